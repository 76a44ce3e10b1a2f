"""Which element types exist, and what is each called by NumPy, ACL and HCCL?

One table, `TABLE`; everything else is a lookup in it. NumPy has no bfloat16; it comes from `ml_dtypes`, which is
imported when bfloat16 is first used (the import takes a tenth of a second that most programs should not pay).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from device.errors import ArgumentError

_UNSUPPORTED_DATA_TYPE = 100026  # ACL_ERROR_UNSUPPORTED_DATA_TYPE


@dataclass(frozen=True)
class DType:
    """Describe one element type.

    Attributes:
        name: NumPy's name, e.g. ``"float32"``.
        size: bytes per element.
        acl: number in ``aclDataType``.
        hccl: number in ``HcclDataType``, -1 where HCCL has no such type.
        aliases: other names in use for it.
    """

    name: str
    size: int
    acl: int
    hccl: int
    aliases: tuple[str, ...] = ()

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype. The first use of bfloat16's imports `ml_dtypes`."""
        if self.name == "bfloat16":
            import ml_dtypes

            found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
            return found
        return np.dtype(self.name)

    @cached_property
    def accumulate(self) -> np.dtype[Any]:
        """The NumPy dtype that sums are formed in: float32 for the half types, the type itself otherwise."""
        return np.dtype(np.float32) if self.name in ("float16", "bfloat16") else self.numpy

    def __str__(self) -> str:
        return self.name


# Sources: aclDataType in acl/acl_base.h and HcclDataType in hccl/hccl_types.h of CANN 8.
TABLE: tuple[DType, ...] = (
    DType("int8", 1, acl=2, hccl=0),
    DType("int16", 2, acl=6, hccl=1),
    DType("int32", 4, acl=3, hccl=2),
    DType("int64", 8, acl=9, hccl=5),
    DType("uint8", 1, acl=4, hccl=7),
    DType("uint16", 2, acl=7, hccl=8),
    DType("uint32", 4, acl=8, hccl=9),
    DType("uint64", 8, acl=10, hccl=6),
    DType("float16", 2, acl=1, hccl=3, aliases=("fp16", "half")),
    DType("bfloat16", 2, acl=27, hccl=11, aliases=("bf16", "bfp16")),
    DType("float32", 4, acl=0, hccl=4, aliases=("fp32", "float")),
    DType("float64", 8, acl=11, hccl=10, aliases=("fp64", "double")),
    DType("bool", 1, acl=12, hccl=-1),
    DType("complex64", 8, acl=16, hccl=-1),
    DType("complex128", 16, acl=17, hccl=-1),
)

_BY_NAME: dict[str, DType] = {name: entry for entry in TABLE for name in (entry.name, *entry.aliases)}
_BY_ACL: dict[int, DType] = {entry.acl: entry for entry in TABLE}
_BY_HCCL: dict[int, DType] = {entry.hccl: entry for entry in TABLE if entry.hccl >= 0}
_SEEN: dict[Any, DType] = dict(_BY_NAME)  # a memo of whatever `dtype` was asked before; never the source of an answer


def dtype(x: Any) -> DType:
    """Return the table entry for a name, a NumPy dtype or type, or an entry itself.

    Numbers are refused: ACL's and HCCL's differ, so say which with `from_acl` or `from_hccl`.

    Raises:
        ArgumentError: the type is not one an NPU computes with, or its byte order is not this machine's.

    Example:
        >>> dtype("bf16").name, dtype(np.float32).hccl, dtype(np.dtype("int64")).acl
        ('bfloat16', 4, 9)
    """
    try:
        entry = _SEEN.get(x)
    except TypeError:  # not hashable
        entry = None
    return _look_up(x) if entry is None else entry


def from_acl(number: int) -> DType:
    """Return the entry with this number in ``aclDataType``.

    Raises:
        ArgumentError: there is none, or it is one that the emulator does not have.
    """
    return _numbered(number, _BY_ACL, "aclDataType")


def from_hccl(number: int) -> DType:
    """Return the entry with this number in ``HcclDataType``.

    Raises:
        ArgumentError: there is none, or it is one that the emulator does not have.

    Example:
        >>> from_hccl(11).name
        'bfloat16'
    """
    return _numbered(number, _BY_HCCL, "HcclDataType")


def _look_up(x: Any) -> DType:
    if isinstance(x, DType):
        return x
    if isinstance(x, (bool, int, np.integer)) or x is None:
        raise ArgumentError(
            f"{x!r} is not an element type; give a name such as 'float32' or a NumPy dtype", code=_UNSUPPORTED_DATA_TYPE
        )
    try:
        found = np.dtype(x)
    except TypeError as error:
        raise ArgumentError(
            f"{x!r} is not an element type; known are {_names()}", code=_UNSUPPORTED_DATA_TYPE
        ) from error
    if not found.isnative:
        raise ArgumentError(
            f"element type {found.str!r} has the other byte order; an NPU has this machine's: convert it first",
            code=_UNSUPPORTED_DATA_TYPE,
        )
    entry = _BY_NAME.get(found.name)
    if entry is None or entry.numpy != found:
        raise ArgumentError(
            f"element type {found.name!r} does not exist on this NPU; known are {_names()}", code=_UNSUPPORTED_DATA_TYPE
        )
    with contextlib.suppress(TypeError):
        _SEEN[x] = entry
    return entry


def _numbered(number: int, table: dict[int, DType], enumeration: str) -> DType:
    entry = table.get(number)
    if entry is None:
        known = ", ".join(f"{key} ({value})" for key, value in sorted(table.items()))
        raise ArgumentError(
            f"{enumeration} {number!r} is not supported; known are {known}", code=_UNSUPPORTED_DATA_TYPE
        )
    return entry


def _names() -> str:
    return ", ".join(entry.name for entry in TABLE)
