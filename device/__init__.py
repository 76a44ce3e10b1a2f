"""One emulated Ascend NPU and its runtime: memory, streams, kernels, virtual time. Knows nothing of other ranks."""

from device.arena import LeakWarning
from device.array import Buffer, DeviceArray
from device.device import Device, MemoryInfo
from device.dtypes import DType, dtype
from device.errors import (
    ArgumentError,
    ClosedError,
    DeviceError,
    IllegalAddressError,
    OutOfMemoryError,
    TimeoutError,
)
from device.kernels.kernel import Cost, Kernel
from device.spec import ChipSpec
from device.stream import Event, Stream
from device.timeline import Span, Timeline

__all__ = [
    "ArgumentError",
    "Buffer",
    "ChipSpec",
    "ClosedError",
    "Cost",
    "DType",
    "Device",
    "DeviceArray",
    "DeviceError",
    "Event",
    "IllegalAddressError",
    "Kernel",
    "LeakWarning",
    "MemoryInfo",
    "OutOfMemoryError",
    "Span",
    "Stream",
    "TimeoutError",
    "Timeline",
    "dtype",
]
