"""What can go wrong on a device, and what may the caller do about it?

One root, `DeviceError`; a child only where the caller acts differently. Every error carries the number that the
vendor's runtime returns for the same mistake in `.code`, so that the C-style facades need no table of their own.
A message says who, what, expected and got: ``device 0: use after free: address 0x... was freed at train.py:41``.
"""

from __future__ import annotations

import builtins


class DeviceError(Exception):
    """Report a failure of an emulated NPU.

    Args:
        message: one sentence.
        code: the ACL error code; the class's own when left out.

    Example:
        >>> ArgumentError("count must not be negative, got -1").code
        107000
        >>> ArgumentError("malloc of 0 bytes", code=100000).code
        100000
    """

    code: int = 500000  # ACL_ERROR_INTERNAL_ERROR

    def __init__(self, message: str = "", *, code: int | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class ArgumentError(DeviceError, ValueError):
    """The caller passed something that cannot be meant: fix the call."""

    code = 107000  # ACL_ERROR_RT_PARAM_INVALID


class IllegalAddressError(DeviceError):
    """An address is not what the operation needs: out of bounds, freed, of another device, or of the host."""

    code = 107000  # the runtime reports a bad pointer as an invalid parameter


class OutOfMemoryError(DeviceError):
    """The device's memory is used up: free something, or ask for less."""

    code = 207001  # ACL_ERROR_RT_MEMORY_ALLOCATION


class ClosedError(DeviceError):
    """The device, stream or array was closed by this program before."""

    code = 107002  # ACL_ERROR_RT_CONTEXT_NULL: what the runtime says after the last reset


class TimeoutError(DeviceError, builtins.TimeoutError):
    """Something did not happen within the time that the caller allowed."""

    code = 107020  # ACL_ERROR_RT_TASK_TIMEOUT
