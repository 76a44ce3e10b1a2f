"""What does each rank of the benchmark do? It times one operation after the other, ours and the peers' in turns.

Not run by hand: `collectives.py` starts it under mpirun as `python -m mpi4py ranks.py CONFIG`, where CONFIG is a JSON
object; rank 0 appends one JSON object per row to the file that it names. What `micro.py` needs too, the timing of
contenders in turns, stands in the upper half.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

import hccl

WORLD = MPI.COMM_WORLD
BLOCK_LIMIT = 200  # calls in a row before the next contender has its turn
BLOCK_ELEMENTS = 1 << 20  # results are compared in pieces of so many elements, to need little memory
PERIOD = 251  # of the values along an array: prime, so that a piece in the wrong place does not look right
POISON = -1.0
COPY_BLOCK_S = 2e-3  # many short copies are timed as one, else time slices of the kernel would hide in the median


# --- timing ---------------------------------------------------------------------------------------------------------


@dataclass
class Contender:
    """Something to time: `call` is one iteration, `before` runs in front of each and is not timed."""

    name: str
    call: Callable[[], Any]
    before: Callable[[], Any] | None = None


def time_block(contender: Contender, calls: int) -> list[float]:
    """Return the seconds of each of `calls` iterations in a row, after a barrier."""
    call, before, clock = contender.call, contender.before, time.perf_counter
    seconds = []
    WORLD.Barrier()
    for _ in range(calls):
        if before is not None:
            before()
        start = clock()
        call()
        seconds.append(clock() - start)
    return seconds


def in_turns(contenders: list[Contender], rounds: int, budget_s: float) -> dict[str, list[float]]:
    """Time all contenders in small blocks that alternate, about `budget_s` each; every other round in reverse order."""
    blocks = {}
    for contender in contenders:
        time_block(contender, 3)
        start = time.perf_counter()
        time_block(contender, 3)
        one_s = WORLD.allreduce((time.perf_counter() - start) / 3, MPI.MAX)
        blocks[contender.name] = max(1, min(BLOCK_LIMIT, int(budget_s / rounds / one_s)))
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        for contender in contenders[:: -1 if turn % 2 else 1]:
            seconds[contender.name] += time_block(contender, blocks[contender.name])
    return seconds


def over_ranks(seconds: list[float]) -> tuple[float, float]:
    """Return (median, best) of the slowest rank."""
    return WORLD.allreduce(median(seconds), MPI.MAX), WORLD.allreduce(min(seconds), MPI.MAX)


class Rows:
    """The rows of this run; rank 0 writes each to the file at once."""

    def __init__(self, path: str) -> None:
        self.path = path

    def add(self, **row: Any) -> None:
        """Append a row."""
        if WORLD.rank == 0:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def progress(self, text: str) -> None:
        """Tell a person who waits what is measured now."""
        if WORLD.rank == 0:
            print(f"  {WORLD.size} ranks: {text}", file=sys.stderr, flush=True)


# --- what the data is, and what it becomes --------------------------------------------------------------------------

_WAVE = (np.arange(BLOCK_ELEMENTS + PERIOD) % PERIOD + 1).astype(np.float32)


def weight(rank: int) -> int:
    """The factor of a rank's data: powers of two, so that a sum tells who is in it; small enough for exact sums."""
    return 1 << rank % 12


def sent_by(rank: int, count: int) -> np.ndarray:
    """What a rank contributes: (count,) float32, integers."""
    return np.resize(_WAVE[:PERIOD] * np.float32(weight(rank)), count)


def expected(op: str, rank: int, ranks: int, part: int) -> Iterator[tuple[int, np.ndarray]]:
    """The result of `op` on a rank in pieces (offset, values); `part` is the count of one rank's share."""
    total = sum(map(weight, range(ranks)))
    runs = {  # (offset in the result, offset in the contribution, count, factor)
        "all_reduce": [(0, 0, ranks * part, total)],
        "reduce_scatter": [(0, rank * part, part, total)],
        "all_gather": [(source * part, 0, part, weight(source)) for source in range(ranks)],
        "all_to_all": [(source * part, rank * part, part, weight(source)) for source in range(ranks)],
    }
    for to, start, count, factor in runs[op]:
        for done in range(0, count, BLOCK_ELEMENTS):
            phase = (start + done) % PERIOD
            yield to + done, _WAVE[phase : phase + min(BLOCK_ELEMENTS, count - done)] * np.float32(factor)


# --- ours and the peers ---------------------------------------------------------------------------------------------


@dataclass
class Library:
    """One library's collective on its own buffers; `read` and `write` reach its result in pieces."""

    name: str
    call: Callable[[], Any]
    read: Callable[[int, int], np.ndarray]
    write: Callable[[int, np.ndarray], None]
    restore: Callable[[], Any] = lambda: None  # the contribution, where the call overwrites it

    def check(self, op: str, part: int) -> str:
        """Poison the result, call once, compare; return what is wrong on the lowest rank that has an error, or ""."""
        poison = np.full(BLOCK_ELEMENTS, POISON, np.float32)
        for offset, values in expected(op, WORLD.rank, WORLD.size, part):
            self.write(offset, poison[: values.size])
        self.restore()
        self.call()
        wrong = ""
        for offset, values in expected(op, WORLD.rank, WORLD.size, part):
            found = self.read(offset, values.size)
            if not wrong and not np.array_equal(found, values):
                i = int(np.flatnonzero(found != values)[0])
                wrong = f"{self.name} {op}: rank {WORLD.rank} element {offset + i}: {found[i]}, not {values[i]}"
        return next(filter(None, WORLD.allgather(wrong)), "")


def ours(comm: hccl.Communicator, op: str, sent: np.ndarray, count: int) -> Library:
    """Our public API with default settings: the call, then the stream's synchronize."""
    x, out = comm.device.array(sent), comm.device.empty((count,), "float32")
    collective, synchronize = getattr(comm, op), comm.device.default_stream.synchronize

    def call() -> None:
        collective(x, out)
        synchronize()

    def write(offset: int, values: np.ndarray) -> None:
        out[offset : offset + values.size].copy_from(values)

    return Library("ours", call, lambda offset, size: out[offset : offset + size].numpy(), write)


def host_access(array: np.ndarray) -> tuple[Callable[[int, int], np.ndarray], Callable[[int, np.ndarray], None]]:
    """`read` and `write` of a host array."""

    def write(offset: int, values: np.ndarray) -> None:
        array[offset : offset + values.size] = values

    return lambda offset, size: array[offset : offset + size], write


def mpi(op: str, sent: np.ndarray, received: np.ndarray) -> Library:
    """mpi4py on host arrays."""
    names = {
        "all_reduce": "Allreduce",
        "reduce_scatter": "Reduce_scatter_block",
        "all_gather": "Allgather",
        "all_to_all": "Alltoall",
    }
    collective = getattr(WORLD, names[op])
    return Library("mpi", lambda: collective(sent, received), *host_access(received))


def gloo(op: str, sent: np.ndarray, received: np.ndarray) -> Library:
    """torch.distributed on tensors over the same host arrays. Its all_reduce works in place, on `received`."""
    import torch
    import torch.distributed as dist

    source, target = torch.from_numpy(sent), torch.from_numpy(received)
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(target),
        "reduce_scatter": lambda: reduce_scatter(target, source),
        "all_gather": lambda: all_gather(target, source),
        "all_to_all": lambda: dist.all_to_all_single(target, source),
    }
    restore = (lambda: np.copyto(received, sent)) if op == "all_reduce" else (lambda: None)
    return Library("gloo", calls[op], *host_access(received), restore)


def start_gloo() -> str:
    """Join torch's process group over loopback; return torch's version."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, WORLD.size, True, wait_for_workers=False) if WORLD.rank == 0 else None
    port = WORLD.bcast(store.port if store is not None else None)
    store = store or dist.TCPStore("127.0.0.1", port, WORLD.size, False)
    dist.init_process_group("gloo", store=store, rank=WORLD.rank, world_size=WORLD.size)
    return str(torch.__version__)


# --- one cell -------------------------------------------------------------------------------------------------------


def copy_bound(sent: np.ndarray, received: np.ndarray, rounds: int, budget_s: float) -> float:
    """Seconds in which every rank copies the whole buffer, all at once: the slowest rank's, median over the rounds."""
    whole = sent if sent.size >= received.size else received
    target = received if received.size == sent.size else np.zeros_like(whole)
    np.copyto(target, whole)
    start = time.perf_counter()
    np.copyto(target, whole)
    one_s = WORLD.allreduce(time.perf_counter() - start, MPI.MIN)
    copies = max(1, int(max(COPY_BLOCK_S, budget_s / rounds) / max(one_s, 1e-7) / WORLD.size))
    seconds = []
    for _ in range(rounds):
        WORLD.Barrier()
        start = time.perf_counter()
        for _ in range(copies):
            np.copyto(target, whole)
        seconds.append(WORLD.allreduce(time.perf_counter() - start, MPI.MAX) / copies)
    return median(seconds)


def measure(
    comm: hccl.Communicator, op: str, nbytes: int, peers: list[str], config: dict[str, Any], rows: Rows
) -> None:
    """Measure one operation at one size and add a row for each peer."""
    ranks, rank = WORLD.size, WORLD.rank
    part = nbytes // 4 if config["per_rank_size"] and op in ("all_gather", "reduce_scatter") else nbytes // 4 // ranks
    part = max(1, part)
    sent = sent_by(rank, part if op == "all_gather" else ranks * part)
    received = np.zeros(part if op == "reduce_scatter" else ranks * part, np.float32)
    libraries = [ours(comm, op, sent, received.size)]
    libraries += [{"mpi": mpi, "gloo": gloo}[peer](op, sent, received) for peer in peers]

    wrong = [text for library in libraries if (text := library.check(op, part))]
    contenders = [Contender(library.name, library.call) for library in libraries]
    seconds = in_turns(contenders, config["rounds"], config["seconds"])
    wrong += [text for library in libraries if (text := library.check(op, part))]
    bound_s = copy_bound(sent, received, config["rounds"], config["seconds"] / 2)

    ours_median_s, ours_best_s = over_ranks(seconds["ours"])
    for peer in peers or [None]:
        row: dict[str, Any] = {"part": "collective", "op": op, "ranks": ranks, "bytes": nbytes}
        row |= {"buffer_bytes": 4 * ranks * part, "calls": len(seconds["ours"]), "peer": peer}
        row |= {"ours_median_s": ours_median_s, "ours_best_s": ours_best_s}
        if peer is not None:
            peer_median_s, peer_best_s = over_ranks(seconds[peer])
            row |= {"peer_calls": len(seconds[peer]), "peer_median_s": peer_median_s, "peer_best_s": peer_best_s}
            row |= {"ratio_median": peer_median_s / ours_median_s, "ratio_best": peer_best_s / ours_best_s}
        row |= {"copy_s": bound_s, "bound_fraction": bound_s / ours_median_s, "correct": not wrong, "wrong": wrong}
        rows.add(**row)


def main() -> None:
    """Measure all cells of the configuration."""
    config = json.loads(sys.argv[1])
    rows = Rows(config["rows"])
    peers = [peer for peer in config["peers"] if peer != "gloo" or importlib.util.find_spec("torch")]
    versions = {"mpi": MPI.Get_library_version().split("\0")[0].split(", package")[0].strip()}
    if "gloo" in peers:
        versions["torch"] = start_gloo()
    rows.add(part="versions", **versions)
    with hccl.init() as comm:
        for op, nbytes in config["cells"]:
            rows.progress(f"{op}, {nbytes} bytes")
            measure(comm, op, nbytes, peers, config, rows)
    if "gloo" in peers:
        import torch.distributed as dist

        WORLD.Barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
