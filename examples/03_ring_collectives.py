"""reduce_scatter and all_gather, and why the two together are an all_reduce.

On a ring of P ranks reduce_scatter moves (P-1)/P of the buffer over each link, and so does all_gather. One after the
other they leave the full sum everywhere: that is the ring all_reduce.

Run: python launch.py -n 4 examples/03_ring_collectives.py
"""

import numpy as np

import hccl

with hccl.init() as comm:
    rank, size, device = comm.rank, comm.size, comm.device
    say = print if rank == 0 else lambda *text: None

    # Two elements for every rank: element i of rank r is 100 r + i.
    x = device.array(np.arange(2 * size, dtype=np.int32) + 100 * rank)
    say("rank 0 has             ", x.numpy())

    part = comm.reduce_scatter(x)  # (2 P) -> (2): the sum, rank r keeps part r
    say("reduce_scatter, rank 0:", part.numpy())

    whole = comm.all_gather(part)  # (2) -> (2 P): the parts of all ranks in rank order
    say("all_gather:            ", whole.numpy())

    reduced = comm.all_reduce(x, out=device.empty(x.shape, x.dtype))  # out of place: x stays as it is
    say("all_reduce:            ", reduced.numpy())
    assert np.array_equal(whole.numpy(), reduced.numpy())

    # What an algorithm does is plain data: a schedule. Here is the ring all_gather, step by step.
    schedule = hccl.build("all_gather", "ring", size)
    for number, step in enumerate(schedule.steps()):
        copies = [(s, d) for s, d in zip(step.src.tolist(), step.dst.tolist(), strict=True) if s != d]
        if copies:
            say(f"step {number}:", ", ".join(f"{source} -> {target}" for source, target in copies))
