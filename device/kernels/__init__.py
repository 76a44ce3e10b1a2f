"""Which kernels come with the device? Elementwise ones and matmul in NumPy, and tiled attention.

Attention is imported when it is first asked for: programs that only communicate should not pay for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from device.kernels.elementwise import add, cast, copy, fill, matmul, scale
from device.kernels.kernel import Cost, Kernel

if TYPE_CHECKING:
    from device.kernels.attention import flash_attention as flash_attention
    from device.kernels.attention import flash_attention_backward as flash_attention_backward
    from device.kernels.attention import flash_attention_kernel as flash_attention_kernel

_LAZY = ("flash_attention", "flash_attention_backward", "flash_attention_kernel")

__all__ = ["Cost", "Kernel", "add", "cast", "copy", "fill", "matmul", "scale", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from device.kernels import attention

    return getattr(attention, name)
