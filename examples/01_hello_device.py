"""One emulated NPU: memory, kernels, and the time that a real one would have taken.

Run: python examples/01_hello_device.py
"""

import numpy as np

from device import Device, IllegalAddressError
from device.kernels import add, matmul

with Device() as npu:
    print(f"{npu.spec.soc_name} with {npu.memory_info().total >> 30} GiB")

    # Arrays live in device memory. `array` copies from the host, `numpy` waits for the kernels and copies back.
    x = npu.array(np.arange(6, dtype=np.float32).reshape(2, 3))
    y = npu.array(np.ones((3, 2), np.float32))
    z = npu.zeros((2, 2), "float32")

    # `launch` only queues a kernel: tasks of one stream run in order, while the host goes on.
    npu.launch(matmul, x, y, out=z)
    npu.launch(add, z, z, out=z)
    print("2 * x @ y =", z.numpy().tolist())

    # Views share memory with their array.
    z[0].copy_from(np.array([-1, -2], np.float32))
    print("first row overwritten:", z.numpy().tolist())

    # The device is stricter than the chip: it notices a use after free, and says where the memory was freed.
    z.free()
    try:
        z.numpy()
    except IllegalAddressError as error:
        print("refused:", str(error).split(":")[1].strip())

    # Every stream also carries virtual time: copies over the host link, launches, compute or memory traffic.
    stream = npu.default_stream
    print(f"an NPU would have taken {stream.now_s * 1e6:.1f} µs, {stream.compute_s * 1e6:.1f} µs of it in kernels")
