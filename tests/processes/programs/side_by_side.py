"""Two communicators of the same ranks at once on two streams; messages of different sizes between the same pairs."""

from __future__ import annotations

import numpy as np

import hccl

with hccl.init() as world:
    other = world.sub(range(world.size))
    assert other is not None
    streams = [world.device.stream(), world.device.stream()]
    for turn in range(20):
        results = []
        for comm, count, stream in zip((world, other), (3 + turn, 70_001), streams, strict=True):
            x = world.device.array(np.full(count, world.rank + turn, "int64"))
            results.append((comm.all_gather(x, stream=stream), count))
        for out, count in results:
            expected = np.repeat(np.arange(world.size) + turn, count)
            assert np.array_equal(out.numpy(), expected), (world.rank, turn, count)
    if world.rank:
        other.close()  # rank 0 leaves without: that must not hold anybody up
print("all right")
