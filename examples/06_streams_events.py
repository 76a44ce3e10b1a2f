"""Hide communication behind computing: two streams, and events that keep them in order.

Each step needs the sum of what the step before computed. In halves A and B, A can be reduced while B is computed:

    one stream     compute A, B | reduce A, B | compute A, B | reduce A, B
    two streams    compute A    | compute B   | compute A    | compute B    |
                                | reduce A    | reduce B     | reduce A     | reduce B

Run: python launch.py -n 4 examples/06_streams_events.py
"""

import numpy as np

import hccl
from device.kernels import matmul

STEPS, N = 4, 512

with hccl.init() as comm:
    device = comm.device
    weights = device.array(np.eye(N, dtype=np.float16))
    halves = [device.array(np.ones((2048, N), np.float16)) for _ in range(2)]
    products = [device.empty((2048, N), "float16") for _ in range(2)]

    def run(overlap: bool) -> float:
        """Do all steps; return the virtual seconds that they took."""
        compute = device.stream("compute")
        reduce = device.stream("reduce") if overlap else compute
        reduced = [compute.record(), compute.record()]
        for _ in range(STEPS):
            for i in range(2):
                compute.wait(reduced[i])  # this half is summed: it may be multiplied
                device.launch(matmul, halves[i], weights, out=products[i], stream=compute)
                reduce.wait(compute.record())  # and only then summed again
                comm.all_reduce(products[i], op="max", stream=reduce)
                reduced[i] = reduce.record()
                halves[i], products[i] = products[i], halves[i]
        for event in reduced:
            compute.wait(event)
        compute.synchronize()
        return compute.now_s

    one, two = run(overlap=False), run(overlap=True)
    assert all((half.numpy() == 1).all() for half in halves)
    if comm.rank == 0:
        print(f"one stream:  {one * 1e6:7.1f} µs of virtual time")
        print(f"two streams: {two * 1e6:7.1f} µs, {one / two:.2f} times as fast")
