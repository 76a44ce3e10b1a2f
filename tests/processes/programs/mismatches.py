"""Ranks that disagree: six cases on communicators and streams of their own; prints each rank's errors as JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

import numpy as np

import hccl
from device import Stream


def main() -> None:
    with hccl.init() as comm:
        first = comm.rank == 0

        def ones(count: int = 4, dtype: str = "float32") -> object:
            return comm.device.array(np.ones(count), dtype)

        def order(c: hccl.Communicator, s: Stream) -> None:
            calls = [lambda: c.all_reduce(ones(), stream=s), lambda: c.broadcast(ones(), 0, stream=s)]
            for call in calls if first else reversed(calls):
                call()

        cases: dict[str, Callable[[hccl.Communicator, Stream], object]] = {
            "count": lambda c, s: c.all_reduce(ones(5 if first else 4), stream=s),
            "dtype": lambda c, s: c.all_reduce(ones(4, "int32" if first else "float32"), stream=s),
            "op": lambda c, s: c.all_reduce(ones(), op="max" if first else "sum", stream=s),
            "root": lambda c, s: c.broadcast(ones(), 1 if first else 0, stream=s),
            "operation": lambda c, s: c.all_gather(ones(), stream=s) if first else c.all_reduce(ones(), stream=s),
            "order": order,
        }
        report = {}
        for name, call in cases.items():
            sub, stream = comm.sub(range(comm.size)), comm.device.stream()
            try:
                call(sub, stream)
                stream.synchronize()
            except hccl.HcclError as error:
                report[name] = [type(error).__name__, str(error)]
            sub.abort()
            with contextlib.suppress(hccl.HcclError):
                comm.device.release_stream(stream)
            comm.barrier()  # the world is still good
            comm.device.synchronize()
        print(json.dumps({"rank": comm.rank, "errors": report}), flush=True)


if __name__ == "__main__":
    main()
