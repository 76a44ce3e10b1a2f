"""Ranks as threads of one process: `run` for notebooks and unit tests, `init_all` for one thread per device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from device import Device
from hccl.communicator import Communicator
from hccl.config import Config
from hccl.errors import ArgumentError, BrokenError, HcclError, TimeoutError
from hccl.record import Board
from hccl.topology import Topology
from hccl.transport.local import LocalLink, Presence
from hccl.world import assemble, introduce

Result = TypeVar("Result")


def _world(
    devices: Sequence[Device],
    name: str,
    topology: Topology | str | None,
    config: Config | None,
    owns_devices: bool,
) -> tuple[list[Communicator], list[Presence]]:
    config = Config.from_environment() if config is None else config
    boards = [Board.create(f"hccl-board-{i}") for i in range(len(devices))]
    members = [introduce(d, b, i, len(devices), config) for i, (d, b) in enumerate(zip(devices, boards, strict=True))]
    presences = [Presence() for _ in devices]
    comms = []
    for rank, (device, board) in enumerate(zip(devices, boards, strict=True)):
        links = [LocalLink(m, d, b, p) for m, d, b, p in zip(members, devices, boards, presences, strict=True)]
        comms.append(
            assemble(device, board, links, rank, name, topology, config, owns_device=owns_devices, threads=True)
        )
    return comms, presences


def init_all(
    devices: Sequence[Device | int],
    *,
    topology: Topology | str | None = None,
    config: Config | None = None,
    name: str = "hccl_world_group",
) -> list[Communicator]:
    """Make one communicator over devices of this process; rank i is `devices[i]`. Call each from a thread of its own.

    devices: `Device` objects (the caller closes them) or ids (closed with their communicator).
    Raises: `ArgumentError` for no device or one that is named twice.

    >>> with contextlib.ExitStack() as stack:  # doctest: +SKIP
    ...     comms = [stack.enter_context(c) for c in hccl.init_all([0, 1])]
    """
    if not devices:
        raise ArgumentError("init_all needs at least one device")
    ids = [d.id if isinstance(d, Device) else d for d in devices]
    if len(set(ids)) != len(ids):
        raise ArgumentError(f"init_all: a device is named once, got {ids}")
    owned = not isinstance(devices[0], Device)
    made = [d if isinstance(d, Device) else Device(d) for d in devices]
    return _world(made, name, topology, config, owned)[0]


def run(
    function: Callable[[Communicator], Result],
    ranks: int,
    *,
    topology: Topology | str | None = None,
    config: Config | None = None,
    name: str = "hccl_world_group",
    timeout_s: float | None = None,
    **device_options: Any,
) -> list[Result]:
    """Call `function(comm)` in `ranks` threads, one NPU each, and return the results in rank order.

    The communicators are closed when the functions return. device_options: what `device.Device` takes (spec, check,
    progress, order). timeout_s: wall seconds for all; then every rank is aborted and `TimeoutError` names those that
    were not done.
    Raises: the error of the rank that failed first by itself; ranks that failed because of it are not reported.

    >>> import hccl
    >>> hccl.run(lambda comm: comm.rank * 10, ranks=3)
    [0, 10, 20]
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError(f"run needs a number of ranks, at least 1, got {ranks!r}")
    if not callable(function):
        raise ArgumentError(f"run needs a function of a communicator, got {function!r}")
    unknown = set(device_options) - {"spec", "check", "progress", "order"}
    if unknown:
        raise ArgumentError(f"run has no option {', '.join(sorted(unknown))} (ranks as threads share one host)")
    devices = [Device(rank, ordinal=rank, **device_options) for rank in range(ranks)]
    comms, presences = _world(devices, name, topology, config, owns_devices=True)
    results: list[Any] = [None] * ranks
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        try:
            with comms[rank] as comm:
                results[rank] = function(comm)
        except SystemExit as error:  # of this rank; the program has not asked to end
            if error.code:
                errors.append((rank, HcclError(f"rank {rank} called sys.exit({error.code!r})")))
        except BaseException as error:
            errors.append((rank, error))
        finally:
            presences[rank].left = "its thread has ended"

    threads = [threading.Thread(target=work, args=(r,), name=f"rank {r}", daemon=True) for r in range(ranks)]
    for thread in threads:
        thread.start()
    try:
        late = _join(threads, timeout_s)
    except BaseException as error:  # Ctrl-C: the ranks must not go on behind the caller's back
        for comm in comms:
            comm.abort(f"was stopped by {type(error).__name__}")
        _join(threads, 2.0)
        raise
    if late:
        doing = [f"rank {rank} {_doing(comms[rank])}" for rank in late]
        for rank in late:
            comms[rank].abort(f"was stopped after {timeout_s:g} s")
        _join(threads, 2.0)
        raise TimeoutError(f"hccl.run: not done after {timeout_s:g} s: {'; '.join(doing)}")
    if errors:
        raise _first_cause(errors)
    return results


def _doing(comm: Communicator) -> str:
    """What a rank waits for, as far as its streams know."""
    waits = [wait.describe() for stream in comm.device.streams if (wait := stream._blocked) is not None]
    return f"waits for {' and '.join(waits)}" if waits else "is in its own code"


def _join(threads: Sequence[threading.Thread], timeout_s: float | None) -> list[int]:
    """Wait for all threads; return the numbers of those that still run."""
    import time

    end = None if timeout_s is None else time.monotonic() + timeout_s
    for thread in threads:
        thread.join(None if end is None else max(0.0, end - time.monotonic()))
    return [i for i, thread in enumerate(threads) if thread.is_alive()]


def _first_cause(errors: Sequence[tuple[int, BaseException]]) -> BaseException:
    """The error that was not caused by another rank's."""
    own = [error for _, error in errors if not isinstance(error, BrokenError) and not getattr(error, "origin", "")]
    return own[0] if own else errors[0][1]
