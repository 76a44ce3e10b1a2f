"""How does a program hold device memory: by hand (`Buffer`), or as a typed array (`DeviceArray`)?

A `Buffer` is what malloc gives: bytes with an address, freed by the program, a leak otherwise. A `DeviceArray` is a
shape and a type over device memory; memory that it allocated itself goes with the last array over it. Both refuse to
be used after free, and say where they were freed and allocated.

The host never sees device memory directly: `DeviceArray.numpy` waits for what writes the array and returns a copy,
`copy_from` waits for what uses it and overwrites it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from device.arena import Allocation
from device.dtypes import DType, dtype
from device.errors import ArgumentError

if TYPE_CHECKING:
    from device.device import Device
    from device.stream import Stream

HostArray = npt.NDArray[Any]
Shape = tuple[int, ...]


class Owner:
    """Frees an array's allocation when the last array that holds this object is garbage collected."""

    __slots__ = ("_allocation",)

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = allocation

    def __del__(self) -> None:
        if self._allocation.live:
            self._allocation.arena.abandon(self._allocation)


class Buffer:
    """Device memory that the program frees itself; made by `Device.malloc`.

    Dropping the object frees nothing: its address may have been handed on as a number. A buffer that is not freed
    when the device closes is reported with the line that allocated it.

    Example:
        >>> from device import Device
        >>> with Device() as npu, npu.malloc(1024) as buffer:
        ...     buffer.view("float32", (16, 16)).shape
        (16, 16)
    """

    __slots__ = ("_alloc", "device")

    def __init__(self, device: Device, allocation: Allocation) -> None:
        self.device = device
        self._alloc = allocation

    @property
    def address(self) -> int:
        """The first address."""
        return self._alloc.address

    @property
    def nbytes(self) -> int:
        """The length that was asked for."""
        return self._alloc.nbytes

    @property
    def freed(self) -> bool:
        """Whether the memory is gone."""
        return not self._alloc.live

    def view(self, dtype: Any, shape: int | Shape | None = None, offset: int = 0) -> DeviceArray:
        """Return an array over this memory, from byte `offset` on; without a shape, over all that is left.

        The view does not keep the memory: it is dead once the buffer is freed.

        Raises:
            ArgumentError: the range does not fit, or `offset` is not a multiple of the element size.
            IllegalAddressError: the buffer was freed.
        """
        alloc = self._alloc
        if not alloc.live:
            raise alloc.dead()
        kind = _entry(dtype)
        if offset < 0 or offset > alloc.nbytes or offset % kind.size:
            raise ArgumentError(
                f"{alloc.arena.name}: a view of {kind} cannot start at byte {offset} of a {alloc.nbytes}-byte buffer"
            )
        if shape is None:
            if (alloc.nbytes - offset) % kind.size:
                raise ArgumentError(
                    f"{alloc.arena.name}: {alloc.nbytes - offset} bytes are not a whole number of {kind} elements"
                )
            shape = ((alloc.nbytes - offset) // kind.size,)
        elif isinstance(shape, int):
            shape = (shape,)
        count = _count(shape)
        if offset + count * kind.size > alloc.nbytes:
            raise ArgumentError(
                f"{alloc.arena.name}: a view of {shape} {kind} from byte {offset} needs {offset + count * kind.size} "
                f"bytes, the buffer has {alloc.nbytes}"
            )
        view: HostArray = np.ndarray(shape, kind.numpy, alloc.arena.bytes, alloc.address + offset - alloc.arena.base)
        return DeviceArray(self.device, alloc, None, view, alloc.address + offset)

    def free(self) -> None:
        """Free the memory.

        Raises:
            IllegalAddressError: it was freed before; the message names both lines.
        """
        self._alloc.arena.free(self._alloc)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._alloc.live:
            self.free()

    def __repr__(self) -> str:
        state = "" if self._alloc.live else ", freed"
        return f"Buffer({self.nbytes} bytes, address={self.address:#x}, device={self.device.id}{state})"


class DeviceArray:
    """A typed, shaped view of device memory; made by `Device.array`, `empty`, `zeros` and `Buffer.view`.

    Attributes:
        shape, dtype, ndim, size, nbytes: as in NumPy.
        address: integer device address of the first element.
        device: the device it lies on.

    Indexing with integers, slices, ``...`` and None, and `reshape`, give views of the same memory. NumPy operators do
    not apply: computing is done by kernels (`Device.launch`).

    Example:
        >>> from device import Device
        >>> with Device() as npu:
        ...     x = npu.array(np.arange(6).reshape(2, 3))
        ...     x[1].numpy().tolist()
        [3, 4, 5]
    """

    __slots__ = (
        "__weakref__",
        "_alloc",
        "_last_call",
        "_np",
        "_owner",
        "_sig",
        "address",
        "device",
        "dtype",
        "nbytes",
        "shape",
        "size",
    )
    __array_ufunc__ = None  # NumPy arithmetic would copy to the host unseen: refuse it

    device: Device
    shape: Shape
    dtype: np.dtype[Any]
    size: int
    nbytes: int
    address: int
    _alloc: Allocation
    _owner: Owner | None
    _np: HostArray  # the same memory, for tasks; the host must not look through it while tasks may run
    _last_call: Any  # for the library that last called with it: what it prepared, found again without a lookup
    _sig: tuple[int, int, int] | None  # (address, size, HCCL type) tells whether a call repeats; None: not contiguous

    def __init__(self, device: Device, alloc: Allocation, owner: Owner | None, view: HostArray, address: int) -> None:
        """Wrap a view of an allocation; programs use the methods of `Device` and `Buffer`."""
        self.device = device
        self._alloc = alloc
        self._owner = owner
        self._np = view
        self._last_call = None
        self.address = address
        self.shape = view.shape
        self.dtype = kind = view.dtype
        self.size = size = view.size
        self.nbytes = view.nbytes
        self._sig = (address, size, dtype(kind).hccl) if view.flags.c_contiguous else None

    # ----------------------------------------------------------------------------------------------- what it looks like
    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after another in C order, as collectives need."""
        return self._np.flags.c_contiguous

    @property
    def freed(self) -> bool:
        """Whether the memory is gone."""
        return not self._alloc.live

    @property
    def _writer(self) -> Stream | None:
        """The stream whose task wrote this memory last, None when the host has waited for it since."""
        writers = self._alloc.writers
        return writers[-1] if writers else None

    @_writer.setter
    def _writer(self, stream: Stream) -> None:
        self._alloc.written_by(stream)

    @property
    def _reader(self) -> Stream | None:
        """The stream whose task was the last to be queued to read this memory."""
        readers = self._alloc.readers
        return readers[-1] if readers else None

    @_reader.setter
    def _reader(self, stream: Stream) -> None:
        self._alloc.read_by(stream)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a DeviceArray without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[DeviceArray]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        state = "" if self._alloc.live else ", freed"
        return (
            f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device.id}, "
            f"address={self.address:#x}{state})"
        )

    # ------------------------------------------------------------------------------------------------------ host copies
    def numpy(self) -> HostArray:
        """Wait for what writes this array and return a copy in host memory, C-contiguous.

        Raises:
            IllegalAddressError: the memory was freed.
            DeviceError: a task that wrote it failed (its own error is raised).
        """
        self._settle(to_device=False)
        copy: HostArray = self._np.copy()
        return copy

    def copy_to(self, host: HostArray) -> HostArray:
        """Wait for what writes this array and copy it into a host array of the same shape and type; return that."""
        if not isinstance(host, np.ndarray) or host.shape != self.shape or host.dtype != self.dtype:
            raise ArgumentError(f"copy_to: expected a host array of {self._kind()}, got {_kind_of(host)}")
        self._settle(to_device=False)
        np.copyto(host, self._np)
        return host

    def copy_from(self, source: Any) -> DeviceArray:
        """Overwrite the array; return it.

        Args:
            source: an ndarray or buffer of the same shape and type, or (nested lists of) numbers that fit; waits for
                the tasks that use the array, then copies at once. A `DeviceArray` of the same device and type is
                copied by a task behind those that wrote either of the two.

        Raises:
            ArgumentError: shape or type differ.
            IllegalAddressError: the memory was freed, or `source` lies on another device.
        """
        if isinstance(source, DeviceArray):
            self.device.copy(source, self)
            return self
        host = self._from_host(source)
        if host.shape != self.shape:
            raise ArgumentError(f"copy_from: expected {self._kind()}, got {_kind_of(host)}")
        self._settle(to_device=True)
        np.copyto(self._np, host)
        return self

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> HostArray:
        """Give NumPy a host copy when asked for one (``np.asarray(x)``)."""
        if copy is False:
            raise ValueError("device memory cannot be seen by the host without a copy")
        host = self.numpy()
        return host if dtype is None else host.astype(dtype, copy=False)

    # ------------------------------------------------------------------------------------------------------------ views
    def __getitem__(self, key: Any) -> DeviceArray:
        return self._view(self._np[_basic(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        target = self[key]
        if isinstance(value, DeviceArray):
            target.copy_from(value)
            return
        host = target._from_host(value)
        target.copy_from(np.broadcast_to(host, target.shape) if host.ndim == 0 else host)

    def reshape(self, *shape: int | Shape) -> DeviceArray:
        """Return the same memory in another shape; one axis may be -1.

        Raises:
            ArgumentError: the number of elements differs, or the array is not contiguous.
        """
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        self.require_contiguous("reshape")
        try:
            return self._view(self._np.reshape(wanted))
        except ValueError:
            raise ArgumentError(f"cannot reshape {self.shape} ({self.size} elements) into {wanted}") from None

    def require_contiguous(self, what: str) -> None:
        """Raise ArgumentError unless the elements lie one after another; `what` names the operation."""
        if not self._np.flags.c_contiguous:
            strides = tuple(s // self.dtype.itemsize for s in self._np.strides)
            raise ArgumentError(
                f"{what} needs a contiguous array; this view of shape {self.shape} has element strides {strides}: "
                f"copy it into one first"
            )

    def free(self) -> None:
        """Free the memory now instead of with the last array; every view of it is dead then.

        Raises:
            IllegalAddressError: it was freed before; the message names both lines.
            ArgumentError: this array is only a view of a part, or of a `Buffer`.
        """
        alloc = self._alloc
        if alloc.live and (self._owner is None or self.nbytes != alloc.nbytes):
            owner = "a Buffer: free that" if self._owner is None else "a part of an array: free the whole"
            raise ArgumentError(f"{alloc.arena.name}: free: this array is a view of {owner}")
        alloc.arena.free(alloc)

    # ---------------------------------------------------------------------------------------------------------- private
    def _view(self, view: HostArray) -> DeviceArray:
        alloc = self._alloc
        if not alloc.live:
            raise alloc.dead()
        address = alloc.arena.base + view.__array_interface__["data"][0] - alloc.arena.pointer
        return DeviceArray(self.device, alloc, self._owner, view, address)

    def _settle(self, to_device: bool) -> None:
        """Wait until the host may read (or, `to_device`, overwrite) this memory; charge the copy that follows.

        The streams that were waited for are forgotten, unless new ones were noted meanwhile (a note makes a new tuple).
        """
        alloc = self._alloc
        if not alloc.live:
            raise alloc.dead()
        writers, readers = alloc.writers, alloc.readers
        users = readers + writers if to_device else writers
        if not users:
            self.device.charge_copy(self.nbytes, to_device)
            return
        last = users[-1]
        for other in {id(s): s for s in users if s is not last}.values():
            last.wait(other.record())
        self.device.charge_copy(self.nbytes, to_device, last)
        last.synchronize()
        if not alloc.live:
            raise alloc.dead()
        if alloc.writers is writers:
            alloc.writers = ()
        if to_device and alloc.readers is readers:
            alloc.readers = ()

    def _from_host(self, source: Any) -> HostArray:
        """Return `source` as an array of this type: buffers must have it, numbers are converted."""
        if isinstance(source, np.ndarray):
            host = source
        elif isinstance(source, (int, float, complex, list, tuple, np.generic)):
            try:
                return np.asarray(source, self.dtype)
            except (ValueError, TypeError, OverflowError) as error:
                raise ArgumentError(f"cannot take {source!r} as {self.dtype}: {error}") from error
        else:
            host = as_host(source)
        if host.dtype != self.dtype:
            raise ArgumentError(
                f"copy_from: expected {self._kind()}, got {_kind_of(host)}; a copy to the device does not convert"
            )
        return host

    def _kind(self) -> str:
        return f"shape {self.shape} {self.dtype}"


def new_array(device: Device, alloc: Allocation, shape: Shape, kind: DType) -> DeviceArray:
    """Return an array that owns `alloc`."""
    arena, address = alloc.arena, alloc.address
    view: HostArray = np.ndarray(shape, kind.numpy, arena.bytes, address - arena.base)
    return DeviceArray(device, alloc, Owner(alloc), view, address)


def as_host(source: Any) -> HostArray:
    """Return host data as an ndarray, without a copy where it has the buffer protocol; bytes are uint8."""
    return np.asarray(memoryview(source) if isinstance(source, bytes) else source)


def _entry(x: Any) -> DType:
    return dtype(x)


def _count(shape: Shape) -> int:
    if any(not isinstance(n, (int, np.integer)) or n < 0 for n in shape):
        raise ArgumentError(f"a shape consists of integers >= 0, got {shape}")
    return math.prod(shape)


def _kind_of(host: Any) -> str:
    return f"shape {host.shape} {host.dtype}" if isinstance(host, np.ndarray) else repr(type(host).__name__)


def _basic(key: Any) -> tuple[Any, ...]:
    """Return an index that always gives a view: basic, and with an ellipsis so that integers do not give scalars."""
    keys = key if isinstance(key, tuple) else (key,)
    for k in keys:
        if isinstance(k, bool) or not (k is None or isinstance(k, (int, np.integer, slice, EllipsisType))):
            raise ArgumentError(
                f"index {k!r}: device arrays take integers, slices, ... and None; indexing by lists, masks or arrays "
                f"would copy and is not supported"
            )
    return keys if any(k is Ellipsis for k in keys) else (*keys, Ellipsis)
