"""From members to a communicator: one link to each, then the `Communicator` over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from device import Device
from device.wait import Patience
from hccl.communicator import Communicator
from hccl.config import Config
from hccl.errors import ArgumentError, UnsupportedError
from hccl.fabric import Fabric, domains
from hccl.record import Board
from hccl.topology import Topology, preset
from hccl.transport import Link, Member
from hccl.transport.local import LocalLink
from hccl.transport.shm import ShmLink

_CARDS = 8  # NPUs of an Atlas 800T A2, the default server


def host_id() -> str:
    """Identify what can share memory: the running kernel and the PID namespace."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if "ns" in path else Path(path).read_text().strip())
        except OSError:
            parts.append(os.uname().nodename)
    return "/".join(parts)


def introduce(device: Device, board: Board, rank: int, n_ranks: int, config: Config, server: int = 0) -> Member:
    """What this rank tells the others."""
    return Member(
        rank=rank,
        host=host_id(),
        pid=os.getpid(),
        device_id=device.id,
        base=device.arena.base,
        arena=device.arena.segment.descriptor(),
        board=board.segment.descriptor(),
        server=server,
        config=config.shared(),
        n_ranks=n_ranks,
    )


def choose_topology(wanted: Topology | str | None, members: Sequence[Member]) -> Topology:
    """Return the network that virtual time is kept for: what was asked for, else A2 servers as the members lie."""
    ranks = len(members)
    if isinstance(wanted, Topology):
        if wanted.ranks != ranks:
            raise ArgumentError(f"the topology {wanted.name!r} has {wanted.ranks} ranks, the communicator {ranks}")
        return wanted
    domain = np.array(domains(members))
    if wanted is None and domain.max() == 0:
        return preset("a2", ranks=ranks) if ranks <= _CARDS else preset("a2-cluster", ranks=ranks)
    network = preset(wanted or "a2-cluster", ranks=ranks)
    if domain.max() == 0:
        return network
    return replace(network, server_of=domain.astype(np.int64))


def link_all(
    device: Device, board: Board, members: Sequence[Member], rank: int, engine: Callable[[], Any]
) -> tuple[list[Link], Any]:
    """Make this rank's links: itself, processes of its domain, and messages to the rest. Returns (links, engine)."""
    links: list[Link] = []
    used = None
    domain = domains(members)
    for member in members:
        if member.rank == rank:
            links.append(LocalLink(member, device, board))
        elif domain[member.rank] == domain[rank]:
            links.append(ShmLink(member))
        else:
            from hccl.transport.mpi import MpiLink

            used = used or engine()
            links.append(MpiLink(member, used, member.host == members[rank].host))
    return links, used


def no_engine() -> Any:
    """Stand in for the MPI engine where there is no MPI."""
    raise UnsupportedError(
        "ranks on different hosts (or servers forced apart by --servers) talk over MPI: start them by mpirun, or by "
        "launch.py with --backend mpi"
    )


def assemble(
    device: Device,
    board: Board,
    links: Sequence[Link],
    rank: int,
    name: str,
    topology: Topology | str | None,
    config: Config,
    *,
    owns_device: bool,
    engine: Any = None,
    threads: bool = False,
) -> Communicator:
    """Put a world communicator together. `threads`: ranks share one interpreter, so spinning would hold its lock."""
    members = [link.member for link in links]
    domain = domains(members)
    together = sum(d == domain[rank] for d in domain)
    patience = Patience(0, 5, 0.0) if threads else Patience.for_ranks(together)
    device._scheduler.patience = patience
    fabric = Fabric(device, board, links, owns_device=owns_device, engine=engine, threads=threads)
    network = choose_topology(topology, members)
    return Communicator(fabric, range(len(links)), rank, name, network, config, patience)
