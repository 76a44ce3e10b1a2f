"""What can go wrong in a collective, one class per thing a caller would do about it.

Every error carries the vendor's result code (`HcclResult`) in `.code`; the C-named interface returns it. Messages say
who, what, what was expected and what came. Source of the codes: hccl_types.h (CANN 8/9).
"""

from __future__ import annotations

import builtins

from hccl.types import HcclResult


class HcclError(Exception):
    """Root of everything that hccl raises on purpose.

    `origin` is what happened on the rank where it began, when this error only follows from it; ranks that fail because
    of this rank repeat it.
    """

    code: int = HcclResult.E_INTERNAL

    def __init__(self, message: str, code: int | None = None, origin: str = "") -> None:
        super().__init__(message)
        self.origin = origin
        if code is not None:
            self.code = code


class ArgumentError(HcclError, ValueError):
    """An argument of this call is wrong: nothing was sent, the communicator is still good."""

    code = HcclResult.E_PARA


class UnsupportedError(ArgumentError):
    """The call is well-formed, but the modelled product or this emulator does not have it."""

    code = HcclResult.E_NOT_SUPPORT


class ScheduleError(HcclError):
    """A schedule breaks one of the rules of `hccl.verify`; the message names step, rank and chunk."""


class ClosedError(HcclError):
    """The communicator was closed by this rank itself."""

    code = HcclResult.E_UNAVAIL


class BrokenError(HcclError):
    """A peer died, left or gave up; the communicator is of no further use."""

    code = HcclResult.E_REMOTE


class DisagreementError(HcclError):
    """Ranks called different things, or wait for each other in a circle; the message prints the calls."""

    code = HcclResult.E_PARA


class TimeoutError(HcclError, builtins.TimeoutError):
    """A wait passed its limit; the message says for whom and for what."""

    code = HcclResult.E_TIMEOUT
