"""Where do the microseconds go? An empty task on one device, and a small all_reduce taken apart.

Not run by hand: `collectives.py --micro` starts it, as `ranks.py`. The product's code is not touched: time stamps stand
around public calls, and the rest is told by leaving something out and taking the difference.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
from ranks import WORLD, Contender, Rows, in_turns, over_ranks

import hccl
from device import Device, Stream

EMPTY_CALLS = 20_000
SMALL_BYTES = (8, 1024)
LATE_S = 30e-6  # so long the late rank stays away: enough for all others to come, too short for them to fall asleep
CPU_CALLS = 300


def empty_function(stream: Stream) -> None:
    """A task that does nothing."""


def empty_generator(stream: Stream) -> Iterator[None]:
    """A task that does nothing and could wait."""
    return
    yield


def measure_empty(rows: Rows) -> None:
    """Time enqueue and synchronize of empty tasks on one device."""
    with Device() as device:
        stream = device.default_stream
        for task in (empty_function, empty_generator):
            seconds = np.empty(EMPTY_CALLS)
            for i in range(EMPTY_CALLS):
                start = time.perf_counter()
                stream.enqueue(task)
                stream.synchronize()
                seconds[i] = time.perf_counter() - start
            low, middle, high = np.percentile(seconds, [0, 50, 99]).tolist()
            row = {"part": "empty_task", "task": task.__name__, "ranks": 1, "calls": EMPTY_CALLS}
            rows.add(**row, ours_median_s=middle, ours_best_s=low, ours_p99_s=high)


def stay_away() -> None:
    """Let all other ranks arrive first."""
    end = time.perf_counter() + LATE_S
    while time.perf_counter() < end:
        pass


def cpu_seconds(call: Callable[[], None]) -> float:
    """Return the processor time of one call on this rank, all threads, mean of many."""
    WORLD.Barrier()
    start = time.process_time()
    for _ in range(CPU_CALLS):
        call()
    return (time.process_time() - start) / CPU_CALLS


def measure_small(comm: hccl.Communicator, nbytes: int, config: dict[str, Any], rows: Rows) -> None:
    """Time all_reduce + synchronize against MPI's, and variants of it that leave something out.

    The parts add up to rank 0's median: `scheduler` is an empty task on the same stream; `call` what a communicator of
    one rank takes beyond that (arguments, plan, task, virtual time, a copy); `exchange` what all ranks take beyond that
    when the others are there already (header, agreement, notification and the reduction, which NumPy alone does in
    `reduction`); `waiting` the rest. Where ranks outnumber cores, others that are there already have gone to sleep, so
    the line between the last two is rank 0's processor time: `waiting` is then the time without a core.
    """
    count, rank, ranks = nbytes // 4, WORLD.rank, WORLD.size
    sent = np.full(count, rank + 1, np.float32)
    received = np.empty_like(sent)
    x, out = comm.device.array(sent), comm.device.empty((count,), "float32")
    stream, clock = comm.device.default_stream, time.perf_counter
    alone = comm.sub([rank])
    assert alone is not None
    stamps: list[tuple[float, float]] = []
    operands = [sent.copy() for _ in range(ranks)]

    def all_reduce() -> None:
        start = clock()
        comm.all_reduce(x, out)
        queued = clock()
        stream.synchronize()
        stamps.append((queued - start, clock() - queued))

    def plain() -> None:
        comm.all_reduce(x, out)
        stream.synchronize()

    def solo() -> None:
        alone.all_reduce(x, out)
        stream.synchronize()

    def empty() -> None:
        stream.enqueue(empty_function)
        stream.synchronize()

    def reduction() -> None:
        np.add(operands[0], operands[-1], out=received)
        for other in operands[1:-1]:
            np.add(received, other, out=received)

    def check() -> list[str]:
        out.copy_from(np.zeros_like(sent))
        received.fill(0)
        plain()
        WORLD.Allreduce(sent, received)
        total = ranks * (ranks + 1) / 2
        results = {"ours": out.numpy(), "mpi": received}
        texts = [
            f"{name} all_reduce: rank {rank}: {result.tolist()[:4]}…, not {total}"
            for name, result in results.items()
            if not np.all(result == total)
        ]
        return [text for some in WORLD.allgather(texts) for text in some]

    contenders = [
        Contender("all_reduce", all_reduce),
        Contender("mpi", lambda: WORLD.Allreduce(sent, received)),
        Contender("late", plain, stay_away if rank == 0 else None),
        Contender("solo", solo),
        Contender("empty", empty),
        Contender("reduction", reduction),
    ]
    wrong = check()
    seconds = in_turns(contenders, config["rounds"], config["seconds"])
    wrong += check()
    ours_median_s, ours_best_s = over_ranks(seconds["all_reduce"])
    peer_median_s, peer_best_s = over_ranks(seconds["mpi"])
    here = {name: median(values) for name, values in seconds.items()}
    ours_cpu_s, peer_cpu_s = cpu_seconds(plain), cpu_seconds(lambda: WORLD.Allreduce(sent, received))
    crowded = ranks > len(os.sched_getaffinity(0))
    busy_s = ours_cpu_s if crowded else here["late"]
    parts = {
        "scheduler_s": here["empty"],
        "call_s": here["solo"] - here["empty"],
        "exchange_s": busy_s - here["solo"],
        "waiting_s": here["all_reduce"] - busy_s,
    }
    row = {"part": "small_split", "op": "all_reduce", "ranks": ranks, "bytes": nbytes, "peer": "mpi"}
    row |= {"calls": len(seconds["all_reduce"]), "ours_median_s": ours_median_s, "ours_best_s": ours_best_s}
    row |= {"peer_median_s": peer_median_s, "peer_best_s": peer_best_s}
    row |= {"ratio_median": peer_median_s / ours_median_s, "ratio_best": peer_best_s / ours_best_s}
    row |= {"ours_cpu_s": WORLD.allreduce(ours_cpu_s) / ranks, "peer_cpu_s": WORLD.allreduce(peer_cpu_s) / ranks}
    row |= {"rank0_median_s": here["all_reduce"], "host_call_s": median(queued for queued, _ in stamps)}
    row |= {"synchronize_s": median(rest for _, rest in stamps), **parts, "reduction_s": here["reduction"]}
    rows.add(**row, correct=not wrong, wrong=wrong)
    alone.close()


def main() -> None:
    """Measure the part that the configuration names."""
    config = json.loads(sys.argv[1])
    rows = Rows(config["rows"])
    if config["part"] == "empty_task":
        rows.progress("empty task")
        measure_empty(rows)
        return
    with hccl.init() as comm:
        for nbytes in SMALL_BYTES:
            rows.progress(f"all_reduce of {nbytes} bytes, taken apart")
            measure_small(comm, nbytes, config, rows)


if __name__ == "__main__":
    main()
