"""Every operation, compared with NumPy, on however many ranks there are; prints one line when all was right.

operations.py [SxC]: with logical servers, ranks of different ones must talk by messages.
"""

from __future__ import annotations

import json
import sys

import numpy as np

import hccl


def check(comm: hccl.Communicator, count: int, dtype: str) -> None:
    d, me, size = comm.device, comm.rank, comm.size
    rng = np.random.default_rng([size, count])
    parts = rng.integers(-4, 5, (size, count)).astype(dtype)
    wholes = rng.integers(-4, 5, (size, size * count)).astype(dtype)
    split = wholes.reshape(size, size, count)
    mine, whole = d.array(parts[me]), d.array(wholes[me])
    root = count % size
    left, right = (me - 1) % size, (me + 1) % size

    def same(got: object, expected: np.ndarray) -> None:
        assert np.array_equal(got.numpy(), expected), (me, count, dtype)

    out = d.empty(count, dtype)
    for op, ufunc in (("sum", np.add), ("max", np.maximum), ("min", np.minimum), ("prod", np.multiply)):
        same(comm.all_reduce(mine, out, op=op), ufunc.reduce(parts).astype(dtype))
    same(mine, parts[me])
    same(comm.all_reduce(d.array(parts[me])), parts.sum(axis=0).astype(dtype))
    reduced = comm.reduce(mine, root)
    assert (reduced is None) == (me != root)
    if reduced is not None:
        same(reduced, parts.sum(axis=0).astype(dtype))
    same(comm.all_gather(mine), parts.reshape(-1))
    gathered = d.empty(size * count, dtype)
    own = gathered[me * count : (me + 1) * count]
    own.copy_from(parts[me])
    same(comm.all_gather(own, gathered), parts.reshape(-1))
    same(comm.reduce_scatter(whole), split.sum(axis=0).astype(dtype)[me])
    same(comm.all_to_all(whole), split[:, me].reshape(-1))
    same(comm.broadcast(d.array(parts[me]), root), parts[root])
    same(comm.scatter(whole if me == root else None, root, d.empty(count, dtype)), split[root, me])
    got = d.empty(count, dtype)
    comm.batch_send_recv([("recv", got, left), ("send", mine, right)])
    same(got, parts[left])
    if size > 1 and me < 2:
        (comm.send if me == 0 else comm.recv)(mine if me == 0 else got, 1 - me)
        if me == 1:
            same(got, parts[0])
    comm.barrier()


def main() -> None:
    servers = sys.argv[1] if len(sys.argv) > 1 else None
    report = {}
    for algo in ("auto", "mesh", "ring"):
        with hccl.init(config=hccl.Config(algo=algo), name=f"world {algo}", servers=servers) as comm:
            if servers:
                cards = int(servers.split("x")[1])
                for peer in range(comm.size):
                    assert comm.link(peer).direct == (peer // cards == comm.rank // cards)
            for count, dtype in ((0, "float32"), (1, "int8"), (7, "float16"), (1001, "int32"), (70001, "float32")):
                check(comm, count, dtype)
            with comm.split(comm.rank % 2, key=-comm.rank) as half:
                check(half, 300, "float32")
            comm.device.synchronize()
            report = {"rank": comm.rank, "size": comm.size, "sent": comm.bytes_sent()}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
