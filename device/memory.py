"""Device memory in one import: the bytes (`Segment`), their division (`Arena`), and what programs hold."""

from device.arena import Allocation, Arena, LeakWarning, base_address, ordinal_of
from device.array import Buffer, DeviceArray
from device.segment import Segment

__all__ = ["Allocation", "Arena", "Buffer", "DeviceArray", "LeakWarning", "Segment", "base_address", "ordinal_of"]
