"""Vendor numbers: result codes, reduce operations, and the names of operations in errors and headers.

Source: hccl_types.h of CANN 8/9 (enums HcclResult, HcclReduceOp, HcclCMDType).
"""

from __future__ import annotations

from enum import IntEnum


class HcclResult(IntEnum):
    """Return codes of HCCL's C interface."""

    SUCCESS = 0
    E_PARA = 1
    E_PTR = 2
    E_MEMORY = 3
    E_INTERNAL = 4
    E_NOT_SUPPORT = 5
    E_NOT_FOUND = 6
    E_UNAVAIL = 7
    E_SYSCALL = 8
    E_TIMEOUT = 9
    E_OPEN_FILE_FAILURE = 10
    E_TCP_CONNECT = 11
    E_ROCE_CONNECT = 12
    E_TCP_TRANSFER = 13
    E_ROCE_TRANSFER = 14
    E_RUNTIME = 15
    E_DRV = 16
    E_PROFILING = 17
    E_CCE = 18
    E_NETWORK = 19
    E_AGAIN = 20
    E_REMOTE = 21
    E_SUSPENDING = 22
    E_OPRETRY_FAIL = 23
    E_OOM = 24


class ReduceOp(IntEnum):
    """Reduce operations that HCCL has; anything else (avg, band …) is refused by name."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3


class OpCode(IntEnum):
    """Operation numbers used in agreement headers and logs (HcclCMDType)."""

    BROADCAST = 1
    ALL_REDUCE = 2
    REDUCE = 3
    SEND = 4
    RECV = 5
    ALL_GATHER = 6
    REDUCE_SCATTER = 7
    ALL_TO_ALL_V = 8
    ALL_TO_ALL = 10
    GATHER = 11
    SCATTER = 12
    BATCH_SEND_RECV = 13
    ALL_GATHER_V = 16
    REDUCE_SCATTER_V = 17
    BARRIER = 103
    SPLIT = 110  # ours: the exchange of colors and keys; HCCL makes sub-communicators without one

    @property
    def label(self) -> str:
        """The name that users call it by."""
        return self.name.lower()
