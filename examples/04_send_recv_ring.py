"""Point to point: pass a value round a ring, with send and recv in one batch.

A send is over only when its receiver has taken the data, as on hardware. If every rank first sent and then received,
all would wait for each other for ever; `batch_send_recv` does both at once, in whatever order they become possible.

Run: python launch.py -n 4 examples/04_send_recv_ring.py
"""

import numpy as np

import hccl

with hccl.init() as comm:
    rank, size, device = comm.rank, comm.size, comm.device
    right, left = (rank + 1) % size, (rank - 1) % size

    here = device.array(np.array([rank * rank], np.int64))  # what travels: rank r starts with r squared
    coming = device.empty((1,), np.int64)
    seen = [int(here.numpy()[0])]

    for _ in range(size - 1):
        comm.batch_send_recv([("send", here, right), ("recv", coming, left)])
        here, coming = coming, here  # two buffers take turns
        seen.append(int(here.numpy()[0]))

    # Collect what everybody saw, to print it in order.
    table = comm.all_gather(device.array(np.array([seen], np.int64))).numpy()
    if rank == 0:
        for r, row in enumerate(table):
            print(f"rank {r} saw {row.tolist()}, in all {row.sum()}")
