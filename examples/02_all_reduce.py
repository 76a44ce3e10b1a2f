"""The first collective: every rank has an array, and every rank gets the sum.

Run: python launch.py -n 4 examples/02_all_reduce.py
"""

import numpy as np

import hccl

with hccl.init() as comm:  # one rank per process, one NPU per rank
    # Rank r contributes [r, r, r] + [0, 10, 20].
    host = np.array([0, 10, 20], np.float32) + comm.rank
    x = comm.device.array(host)

    comm.all_reduce(x, op="sum")  # in place; queued like a kernel, so this returns at once
    total = x.numpy()  # waits for the result

    comm.all_reduce(x, op="max")  # all ranks hold the same by now: nothing changes
    assert np.array_equal(x.numpy(), total)

    # Only one rank prints; the others have the same result, to the bit.
    if comm.rank == 0:
        print(f"{comm.size} ranks: rank 0 gave {host.tolist()}, everybody got {total.tolist()}")
