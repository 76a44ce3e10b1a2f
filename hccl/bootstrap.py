"""How does a process become a rank? `init` finds out who started it; everything ends in a root-info meeting.

Ways in, first that applies: launch.py's store, MPI (mpirun, srun), torchrun's variables, alone. On one host under
launch.py MPI is never initialised, which saves a third of a second and leaves nothing in /dev/shm.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from typing import Any, Literal

from device import Device, Timeline
from hccl import launched
from hccl.communicator import Communicator
from hccl.config import Config
from hccl.errors import ArgumentError, BrokenError, HcclError
from hccl.record import Board
from hccl.root_info import Meeting, RootInfo, open_root
from hccl.topology import Topology, preset
from hccl.world import assemble, introduce, link_all, no_engine

WORLD = "hccl_world_group"  # HCCL's name of the world
_meetings = itertools.count()  # calls of init in this process: all ranks call it equally often, so its number is a name
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def get_root_info(timeout_s: float | None = None) -> bytes:
    """Open a listener on this host and return the 4108 bytes that members need to find it; for one communicator.

    timeout_s: wall seconds until all members must have come; HCCL_CONNECT_TIMEOUT or 120 if left out.
    """
    return open_root(timeout_s)


def from_root_info(
    n_ranks: int,
    info: bytes,
    rank: int,
    device: Device | None = None,
    config: Config | None = None,
    *,
    topology: Topology | str | None = None,
    name: str | None = None,
    server: int = 0,
    engine: Callable[[], Any] = no_engine,
    device_options: dict[str, Any] | None = None,
    root_is_late: bool = False,
) -> Communicator:
    """Join the communicator of `n_ranks` that `info` stands for, as `rank`; returns when all have joined.

    device: this rank's NPU, which stays the caller's; a new one, closed with the communicator, if left out.
    server: logical server of this rank; ranks of different servers talk over MPI even on one host. root_is_late: the
    root may not listen yet, as when its address was agreed beforehand; knock until it does.
    Raises: `ArgumentError`, `DisagreementError` (different n_ranks or config), `TimeoutError` naming the ranks that did
    not come, `BrokenError` when the root cannot be reached or a member went away.
    """
    if not _is_integer(n_ranks) or n_ranks < 1:
        raise ArgumentError(f"n_ranks is a number of ranks, got {n_ranks!r}")
    if not _is_integer(rank) or not 0 <= rank < n_ranks:
        raise ArgumentError(f"rank is from 0 to {n_ranks - 1}, got {rank!r}")
    n_ranks, rank = int(n_ranks), int(rank)
    RootInfo.unpack(info)
    config = Config.from_environment() if config is None else config
    npu = Device(rank, **(device_options or {})) if device is None else device
    try:
        board = Board.create(f"hccl-board-{rank}")
        member = introduce(npu, board, rank, n_ranks, config, server)
        meeting = Meeting(info, member, config.connect_timeout_s, root_is_late)
        members = meeting.gather()
        try:
            links, used = link_all(npu, board, members, rank, engine)
            comm = assemble(
                npu,
                board,
                links,
                rank,
                name or meeting.name,
                topology,
                config,
                owns_device=device is None,
                engine=used,
            )
        except Exception as error:
            meeting.confirm(str(error))
            raise
        meeting.confirm(None)
        return comm
    except BaseException:
        if device is None:
            npu.abort()
        raise


def _is_integer(x: Any) -> bool:
    return hasattr(x, "__index__") and not isinstance(x, bool)


def init(
    device: Device | None = None,
    config: Config | None = None,
    *,
    topology: Topology | str | None = None,
    servers: str | None = None,
    name: str = WORLD,
    check: Literal["default", "strict", "off"] | None = None,
    progress: Literal["thread", "inline"] = "thread",
    order: Literal["eager", "lazy"] | None = None,
) -> Communicator:
    """Return the world communicator: all processes that were started together, one NPU each; alone, a world of one.

    topology: what virtual time is kept for (a `Topology` or preset name; HCCL_TOPOLOGY; Atlas A2 servers). servers:
    "SxC", logical servers forced apart (HCCL_SERVERS). check, progress, order: as of `device.Device`.
    Raises: as `Communicator.from_root_info`.

    >>> import hccl
    >>> with hccl.init() as comm:
    ...     comm.rank, comm.size
    (0, 1)
    """
    start = _Start.find()
    topology = topology or os.environ.get("HCCL_TOPOLOGY") or None
    servers = servers or os.environ.get("HCCL_SERVERS") or None
    server = _server(servers, start.rank, start.size)
    if isinstance(topology, str):
        preset(topology, ranks=start.size)  # wrong names and sizes are every rank's own to find, before they meet
    if servers is not None and not servers.startswith("1x") and not start.mpi:
        no_engine()
    timeline = Timeline(enabled=bool(os.environ.get("HCCL_TRACE")))
    options = {"check": check, "progress": progress, "order": order, "timeline": timeline, "ordinal": start.rank}
    comm = from_root_info(
        start.size,
        start.root_info(name),
        start.rank,
        device,
        config,
        topology=topology,
        name=name,
        server=server,
        engine=start.engine,
        device_options=options,
        root_is_late=start.launcher is None and not start.mpi,
    )
    atexit.register(comm._fabric.say_goodbye)
    if start.launcher is not None:
        comm._fabric.reporter = start.launcher.report
        if timeline.enabled:
            _send_trace_at_close(comm, start.launcher)
    return comm


def _server(servers: str | None, rank: int, size: int) -> int:
    """Logical server of `rank` under "SxC"."""
    if servers is None:
        return 0
    count, _, cards = servers.lower().partition("x")
    if not count.isdecimal() or not cards.isdecimal() or int(count) * int(cards) != size:
        raise ArgumentError(f"servers={servers!r}: expected SxC with S*C = {size} ranks, as 2x{max(1, size // 2)}")
    return rank // int(cards)


class _Start:
    """Who started this process, and how bytes get from rank 0 to the others."""

    def __init__(self, rank: int, size: int, launcher: launched.Launcher | None = None, mpi: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.launcher = launcher
        self.mpi = mpi

    @classmethod
    def find(cls) -> _Start:
        environment = os.environ
        launcher = launched.connect()
        if launcher is not None:
            atexit.register(launcher.close)  # first registered, last called
            mpi = environment.get("HCCL_BACKEND", "mpi") == "mpi"
            return cls(int(environment["HCCL_RANK"]), int(environment["HCCL_SIZE"]), launcher, mpi)
        for rank, size, _ in _MPI_VARIABLES:
            if environment.get(size, "").isdecimal() and rank in environment:
                ranks = int(environment[size])
                if ranks > 1:
                    return cls(int(environment[rank]), ranks, mpi=True)
        if "RANK" in environment and "WORLD_SIZE" in environment:
            return cls(int(environment["RANK"]), int(environment["WORLD_SIZE"]))
        return cls(0, 1)

    def root_info(self, name: str) -> bytes:
        """Make the root info on rank 0 and get it to the others."""
        if self.size == 1:
            return open_root()
        if self.launcher is not None:
            return self._by_launcher(self.launcher, f"root_info/{name}/{next(_meetings)}")
        if self.mpi:
            return self._by_mpi()
        return self._by_torchrun()

    def _by_launcher(self, launcher: launched.Launcher, key: str) -> bytes:
        if self.rank == 0:
            info = open_root()
            launcher.put(key, info)
            return info
        try:
            return launcher.get(key, Config.from_environment().connect_timeout_s, source=0)
        except launched.LauncherError as error:
            raise BrokenError(f"rank {self.rank}: the root info of rank 0 did not come: {error}") from error

    def _by_mpi(self) -> bytes:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        if world.size != self.size:
            raise HcclError(
                f"the launcher's variables say {self.size} ranks, but MPI_COMM_WORLD has {world.size}: this mpi4py "
                "uses another MPI library than the mpirun that started it"
            )
        info: bytes = world.bcast(open_root() if self.rank == 0 else None, root=0)
        return info

    def _by_torchrun(self) -> bytes:
        """Rank 0 listens beside the port that torchrun gave it (its own store holds that one); the others knock."""
        environment = os.environ
        try:
            address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"]) + 1 + next(_meetings)
        except (KeyError, ValueError):
            raise ArgumentError("RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT are not") from None
        job = environment.get("TORCHELASTIC_RUN_ID", "") + f"/{port}/{self.size}"
        token = hashlib.blake2b(job.encode(), digest_size=16).digest()
        if self.rank == 0:
            return open_root(port=port, token=token)
        return RootInfo(token, address, port, f"{address}_{port}").pack()

    def engine(self) -> Any:
        """The MPI engine for ranks that do not share memory."""
        if not self.mpi:
            return no_engine()
        from hccl.transport.mpi import MpiEngine

        return MpiEngine()


def _send_trace_at_close(comm: Communicator, launcher: launched.Launcher) -> None:
    """Give the launcher the trace when the device closes, or when the program ends without that."""
    device, rank = comm.device, comm.rank

    def send() -> None:
        atexit.unregister(send)
        events = device.timeline.chrome_events(rank, f"rank {rank}")
        launcher.put(f"trace/{rank}", json.dumps(events).encode())

    device.add_close_hook(send)
    atexit.register(send)
