"""Hide communication behind computing: two streams, and events that keep them in order.

Two halves of a batch pass through a few layers; after each layer the ranks combine what they have. While one half is
combined, the other can be computed:

    one stream     layer A | reduce A | layer B | reduce B | layer A | …
    two streams    layer A | layer B  | layer A | layer B  | …
                           | reduce A | reduce B | reduce A | …

Run: python launch.py -n 4 examples/06_streams_events.py
"""

import numpy as np

import hccl
from device import Cost, Kernel

LAYERS, SHAPE = 6, (1024, 1024)


def add_one(x: np.ndarray) -> None:
    x += 1


# A kernel is what it does and what it costs an NPU. This one does little here, and costs what a large layer would.
layer = Kernel("layer", add_one, lambda x: Cost(flops=15e9, bytes=2 * x.nbytes, unit="cube"))

with hccl.init() as comm:
    device = comm.device

    def virtual_seconds(overlap: bool) -> float:
        """Send both halves through all layers; return the virtual time."""
        halves = [device.zeros(SHAPE, "float16") for _ in range(2)]
        compute = device.stream()
        reduce = device.stream() if overlap else compute
        ready = [compute.record() for _ in halves]
        for _ in range(LAYERS):
            for i, half in enumerate(halves):
                compute.wait(ready[i])  # computed only once it has been combined …
                device.launch(layer, half, stream=compute)
                reduce.wait(compute.record())  # … and combined only once it has been computed
                comm.all_reduce(half, op="max", stream=reduce)
                ready[i] = reduce.record()
        for event in ready:
            event.synchronize()
        assert all((half.numpy() == LAYERS).all() for half in halves)
        return max(event.time_s for event in ready)

    one, two = virtual_seconds(overlap=False), virtual_seconds(overlap=True)
    if comm.rank == 0:
        print(f"one stream:  {one * 1e6:6.1f} µs of virtual time")
        print(f"two streams: {two * 1e6:6.1f} µs, {one / two:.2f} times as fast")
