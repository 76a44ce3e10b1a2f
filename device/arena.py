"""How is a device's memory divided, and is this address one that may be used?

An `Arena` hands out ranges of one `Segment`. Blocks (live, quarantined or free) tile the used part without gaps:

- `malloc` takes the best-fitting free block, because its pages are warm, and fresh memory otherwise;
- `free` puts a block into quarantine for a while, so that an address that is used after it was freed meets a dead
  allocation and not a stranger's. From there it goes to the bin of its size, which serves a program that allocates the
  same sizes again and again in constant time; when another size is wanted, the bins are emptied and every block joins
  its free neighbours;
- free blocks beyond 1 GiB give their pages back to the system, oldest first.

Addresses are integers, ``1 << 56 | ordinal << 40 | offset``: ranges of different devices never overlap, and neither
looks like a host address, so a pointer tells where it belongs.
"""

from __future__ import annotations

import sys
import threading
import warnings
from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from device.errors import ArgumentError, ClosedError, DeviceError, IllegalAddressError, OutOfMemoryError
from device.segment import Segment
from device.sites import Site, call_site, describe, locate

if TYPE_CHECKING:
    from device.stream import Stream

Check = Literal["default", "strict", "off"]

ALIGNMENT = 512  # a multiple of every alignment the NPU asks for: 32 B unified buffer, 64 B malloc, 512 B cube fractals
_QUARANTINE_RANGES = 256
_QUARANTINE_BYTES = 64 << 20
_STRICT_RESIDENT_BYTES = 256 << 20  # strict mode reuses nothing, but must not eat the host: older pages are given back
_WARM_BYTES = 1 << 30
_BINNED_BYTES = 256 << 20
_POISON = 0xFF  # all ones is a NaN in every IEEE type and in bfloat16, and -1 or the maximum in the integer types
_POISON_BYTES = 1 << 30  # poison at most this much of one allocation: strict mode must not fill 64 GiB of the host

_DEVICE_BIT = 1 << 56
_ORDINAL_SHIFT = 40
_OFFSET_MASK = (1 << _ORDINAL_SHIFT) - 1
MAX_ORDINAL = (1 << 16) - 1
MAX_CAPACITY = 1 << _ORDINAL_SHIFT


def base_address(ordinal: int) -> int:
    """Return the first address of the device with this ordinal.

    Example:
        >>> hex(base_address(3))
        '0x100030000000000'
    """
    if not 0 <= ordinal <= MAX_ORDINAL:
        raise ArgumentError(f"a device ordinal lies in 0..{MAX_ORDINAL}, got {ordinal}")
    return _DEVICE_BIT | ordinal << _ORDINAL_SHIFT


def ordinal_of(address: int) -> int | None:
    """Return the ordinal of the device that an address belongs to, None for a host address.

    Example:
        >>> ordinal_of(base_address(3) + 512), ordinal_of(0x7F00_0000_1000)
        (3, None)
    """
    return (address >> _ORDINAL_SHIFT) & MAX_ORDINAL if address >> 56 == 1 else None


class LeakWarning(ResourceWarning):
    """Memory that the program allocated by hand was not freed before its device closed."""


if not sys.warnoptions:  # Python hides resource warnings; a leak on a device is worth a line, unless the user said how
    warnings.simplefilter("default", LeakWarning)


class Allocation:
    """One range of an arena, alive or dead. Users hold it through a `Buffer` or a `DeviceArray`.

    Attributes:
        address, nbytes: what was asked for.
        live: False from the moment it is freed.
        kind: who frees it: ``"buffer"`` the program (a leak if it does not), ``"array"`` the garbage collector,
            ``"scratch"`` the library.
        fresh: nobody used these bytes before, so they are zero.
        writers, readers: the streams with tasks, possibly unfinished, that write or read it; latest last.
    """

    __slots__ = (
        "address",
        "arena",
        "fresh",
        "freed_site",
        "kind",
        "live",
        "nbytes",
        "readers",
        "site",
        "size",
        "writers",
    )

    def __init__(
        self, arena: Arena, address: int, nbytes: int, size: int, kind: str, site: Site | None, fresh: bool
    ) -> None:
        self.arena = arena
        self.address = address
        self.nbytes = nbytes
        self.size = size
        self.kind = kind
        self.site = site
        self.fresh = fresh
        self.live = True
        self.freed_site: Site | None = None
        self.writers: tuple[Stream, ...] = ()
        self.readers: tuple[Stream, ...] = ()

    def written_by(self, stream: Stream) -> None:
        """Note that a task of `stream` will write this memory; makes a new tuple, which `DeviceArray` relies on."""
        self.writers = _latest(self.writers, stream)

    def read_by(self, stream: Stream) -> None:
        """Note that a task of `stream` will read this memory."""
        self.readers = _latest(self.readers, stream)

    def dead(self, what: str = "use after free") -> DeviceError:
        """Return the error that a use of this allocation deserves now that it is not live."""
        if self.arena.closed:
            return ClosedError(
                f"{self.arena.name}: closed: address {self.address:#x} ({self.nbytes} bytes) "
                f"allocated at {describe(self.site)} went away with its device"
            )
        return IllegalAddressError(
            f"{self.arena.name}: {what}: address {self.address:#x} ({self.nbytes} bytes) {self.freed()}"
        )

    def freed(self) -> str:
        """Say where it was freed and where it was allocated."""
        if self.freed_site is None and self.kind == "array":
            return f"was freed with its last array, allocated at {describe(self.site)}"
        return f"was freed at {describe(self.freed_site)}, allocated at {describe(self.site)}"

    def __repr__(self) -> str:
        state = "live" if self.live else "freed"
        return f"<Allocation {self.address:#x}, {self.nbytes} bytes, {self.kind}, {state}>"


def _latest(streams: tuple[Stream, ...], stream: Stream) -> tuple[Stream, ...]:
    if not streams or (len(streams) == 1 and streams[0] is stream):
        return (stream,)
    return (*[s for s in streams if s is not stream], stream)


class Arena:
    """Own the memory of one device: allocate, free, and turn addresses into views.

    All methods may be called from any thread.

    Args:
        segment: the bytes; the arena closes it.
        base: first address, see `base_address`.
        capacity: bytes that may be in use at a time, at most the segment's length.
        name: how messages call the device.
        check: ``"strict"`` reuses no address while there is room and fills fresh and freed memory with NaNs;
            ``"off"`` neither quarantines nor remembers lines.
    """

    def __init__(
        self, segment: Segment, base: int, capacity: int, *, name: str = "device", check: Check = "default"
    ) -> None:
        if not 0 < capacity <= min(segment.nbytes, MAX_CAPACITY):
            raise ArgumentError(f"{name}: capacity {capacity} does not fit a segment of {segment.nbytes} bytes")
        self.segment = segment
        self.base = base
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.name = name
        self.closed = False
        self.bytes = segment.array  # what views are made of
        self.pointer: int = self.bytes.__array_interface__["data"][0]  # where `base` lies in this process
        self._strict = check == "strict"
        self._sites = check != "off"
        # How much stays in quarantine with its pages; in strict mode the rest stays there without them.
        self._keep_ranges = {"off": 0, "default": _QUARANTINE_RANGES, "strict": sys.maxsize}[check]
        self._keep_bytes = _STRICT_RESIDENT_BYTES if self._strict else _QUARANTINE_BYTES
        self._lock = threading.Lock()
        self._abandoned: deque[Allocation] = deque()  # garbage collected; freed at the next opportunity
        self._top = 0  # end of the tiled part: beyond it no byte was ever used
        self._used = 0
        self._starts: list[int] = []  # offset of every block, sorted
        self._blocks: dict[int, Allocation] = {}  # offset -> its newest allocation
        self._bins: dict[int, list[int]] = {}  # size -> offsets of blocks that left quarantine, not joined yet
        self._binned_bytes = 0
        self._free: dict[int, int] = {}  # offset -> size of free blocks
        self._free_keys: list[int] = []  # size << 40 | offset, sorted: best fit is one bisection
        self._warm: dict[int, int] = {}  # offset -> bytes of a free block with pages behind them, oldest first
        self._warm_bytes = 0
        self._quarantine: deque[Allocation] = deque()
        self._quarantine_bytes = 0
        self._cold: deque[Allocation] = deque()  # strict mode: quarantined, pages given back

    # ------------------------------------------------------------------------------------------------ allocate and free
    def malloc(self, nbytes: int, kind: str = "buffer", site: Site | None = None) -> Allocation:
        """Allocate `nbytes` (0 gives a distinct address without bytes), aligned to 512 bytes, content undefined.

        Raises:
            ArgumentError: `nbytes` is negative.
            OutOfMemoryError: the device has not that much left in one piece.
        """
        if nbytes < 0:
            raise ArgumentError(f"{self.name}: cannot allocate {nbytes} bytes", code=100000)
        if site is None and self._sites:
            site = call_site()
        size = (nbytes + ALIGNMENT - 1) & -ALIGNMENT or ALIGNMENT
        with self._lock:
            if self._abandoned:
                self._bury()
            same = self._bins.get(size)
            if same:
                offset, fresh = same.pop(), False
                self._binned_bytes -= size
            else:
                offset, fresh = self._take(size, nbytes)
            allocation = Allocation(self, self.base + offset, nbytes, size, kind, site, fresh)
            self._blocks[offset] = allocation
            self._used += size
        if self._strict and kind != "scratch":  # the library writes scratch before it reads it, and it is large
            allocation.fresh = False
            self._poison(offset, size)
        return allocation

    def free(self, allocation: Allocation, site: Site | None = None) -> None:
        """Free an allocation.

        Raises:
            IllegalAddressError: it was freed before.
            ClosedError: the device is closed.
        """
        if site is None and self._sites:
            site = call_site()
        with self._lock:
            if not allocation.live:
                raise allocation.dead("double free")
            self._retire(allocation, site)

    def free_address(self, address: int, site: Site | None = None) -> None:
        """Free the allocation that starts at an integer address, as ``aclrtFree`` does.

        Raises:
            IllegalAddressError: nothing starts there, or it was freed before.
        """
        allocation = self._blocks.get(address - self.base)
        if allocation is None:
            self.resolve(address, 0, "free")  # says what is wrong with most addresses
            raise IllegalAddressError(
                f"{self.name}: free: address {address:#x} lies inside an allocation; give its first address"
            )
        self.free(allocation, call_site() if site is None and self._sites else site)

    def abandon(self, allocation: Allocation) -> None:
        """Free an allocation from a finalizer, which may run in any thread at any time, also inside `malloc`."""
        self._abandoned.append(allocation)
        if self._lock.acquire(False):
            try:
                self._bury()
            finally:
                self._lock.release()

    # ---------------------------------------------------------------------------------------------------------- look up
    def find(self, address: int) -> Allocation | None:
        """Return the live allocation that contains `address`, None if there is none."""
        offset = address - self.base
        allocation = self._blocks.get(offset)
        if allocation is None or not allocation.live:
            allocation = self._block_at(offset)
        if allocation is None or not allocation.live or address > allocation.address + allocation.nbytes:
            return None
        return allocation

    def resolve(self, address: int, nbytes: int, what: str = "access") -> npt.NDArray[np.uint8]:
        """Return the `nbytes` bytes at an integer address as a view; `what` names the use in messages.

        Raises:
            IllegalAddressError: the range is not inside one live allocation of this device.
            ClosedError: the device is closed.
        """
        offset = address - self.base
        allocation = self._blocks.get(offset)
        if allocation is not None and allocation.live and 0 <= nbytes <= allocation.nbytes:
            return self.bytes[offset : offset + nbytes]
        if self.closed:
            raise ClosedError(f"{self.name}: closed: {what} of {nbytes} bytes at {address:#x}")
        if nbytes < 0:
            raise ArgumentError(f"{self.name}: {what} of {nbytes} bytes")
        allocation = self._block_at(offset)
        if allocation is None or not allocation.live or address + nbytes > allocation.address + allocation.nbytes:
            raise self._illegal(address, nbytes, what, allocation)
        return self.bytes[offset : offset + nbytes]

    @property
    def used(self) -> int:
        """Bytes of live allocations, rounded up to the alignment."""
        if self._abandoned:
            with self._lock:
                self._bury()
        return self._used

    def live(self, kind: str | None = None) -> list[Allocation]:
        """Return the live allocations, of one kind or all, in the order of their addresses."""
        with self._lock:
            self._bury()
            found = [a for a in self._blocks.values() if a.live and kind in (None, a.kind)]
        return sorted(found, key=lambda a: a.address)

    # ------------------------------------------------------------------------------------------------------------ close
    def leaks(self) -> list[tuple[Site | None, int, int]]:
        """Return (allocating line, count, bytes) of the live buffers, one entry per line."""
        by_line: dict[Any, tuple[Site | None, int, int]] = {}
        for allocation in self.live("buffer"):
            key = None if allocation.site is None else locate(allocation.site)
            _, count, nbytes = by_line.get(key, (None, 0, 0))
            by_line[key] = (allocation.site, count + 1, nbytes + allocation.nbytes)
        return list(by_line.values())

    def report_leaks(self) -> None:
        """Warn about live buffers, once per allocating line; the warning carries that line."""
        for site, count, nbytes in self.leaks():
            filename, line = ("unknown", 0) if site is None else locate(site)
            many = f"{count} buffers ({nbytes} bytes) allocated at {describe(site)} were"
            one = f"1 buffer ({nbytes} bytes) allocated at {describe(site)} was"
            message = f"{self.name}: leak: {one if count == 1 else many} never freed"
            warnings.warn_explicit(message, LeakWarning, filename, line)

    def close(self) -> None:
        """Make every allocation dead and drop the mapping. May be called again."""
        with self._lock:
            if self.closed:
                return
            self._bury()
            self.closed = True
            self._bins.clear()
            self._binned_bytes = 0
            for allocation in self._blocks.values():
                allocation.live = False
                allocation.writers = allocation.readers = ()
            self.bytes = np.empty(0, np.uint8)
        self.segment.close()

    # ----------------------------------------------------------------------------------- private; the lock is held here
    def _take(self, size: int, nbytes: int) -> tuple[int, bool]:
        """Return the offset of a block of `size` bytes and whether it was never used."""
        if self.closed:
            raise ClosedError(f"{self.name}: closed: cannot allocate {nbytes} bytes")
        if self._binned_bytes >= size:
            self._empty_bins()
        keys = self._free_keys
        index = bisect_left(keys, size << _ORDINAL_SHIFT)
        if index < len(keys):
            offset = keys[index] & _OFFSET_MASK
            rest = self._drop_free(offset) - size
            if rest:
                insort(self._starts, offset + size)
                warm = min(self._pop_warm(offset), rest)
                self._add_free(offset + size, rest, warm)
            else:
                self._pop_warm(offset)
            return offset, False
        last = self._starts[-1] if self._starts else 0
        grow = size - self._free.get(last, 0)  # a free block at the end is the beginning of a larger one
        if self._top + grow > self.capacity:
            if self._quarantine or self._cold or self._binned_bytes:
                self._release_all()
                return self._take(size, nbytes)
            raise self._out_of_memory(nbytes)
        if grow < size:
            self._drop_free(last)
            self._pop_warm(last)
            self._top += grow
            return last, False
        offset = self._top
        self._top += size
        self._starts.append(offset)
        return offset, True

    def _retire(self, allocation: Allocation, site: Site | None) -> None:
        """End an allocation's life; its range goes into quarantine."""
        if self._strict:
            self._poison(allocation.address - self.base, allocation.size)
        allocation.live = False
        allocation.freed_site = site
        allocation.writers = allocation.readers = ()
        self._used -= allocation.size
        self._quarantine.append(allocation)
        self._quarantine_bytes += allocation.size
        while self._quarantine_bytes > self._keep_bytes or len(self._quarantine) > self._keep_ranges:
            oldest = self._quarantine.popleft()
            self._quarantine_bytes -= oldest.size
            if self._strict:
                self.segment.discard(oldest.address - self.base, oldest.size)
                self._cold.append(oldest)
            else:
                self._release(oldest)

    def _release(self, allocation: Allocation) -> None:
        """Put a block that leaves quarantine into the bin of its size."""
        size = allocation.size
        same = self._bins.get(size)
        if same is None:
            same = self._bins[size] = []
        same.append(allocation.address - self.base)
        self._binned_bytes += size
        if self._binned_bytes > _BINNED_BYTES:
            self._empty_bins()

    def _release_all(self) -> None:
        for allocation in self._cold:
            self._join(allocation.address - self.base, allocation.size, 0)
        for allocation in self._quarantine:
            self._join(allocation.address - self.base, allocation.size, allocation.size)
        self._cold.clear()
        self._quarantine.clear()
        self._quarantine_bytes = 0
        self._empty_bins()

    def _empty_bins(self) -> None:
        bins, self._bins, self._binned_bytes = self._bins, {}, 0
        for size, offsets in bins.items():
            for offset in offsets:
                self._join(offset, size, size)

    def _join(self, offset: int, size: int, warm: int) -> None:
        """Make a block free and join it with free neighbours."""
        starts = self._starts
        index = bisect_left(starts, offset)
        after = offset + size
        if after in self._free:
            size += self._drop_free(after)
            warm += self._pop_warm(after)
            self._blocks.pop(after, None)
            del starts[index + 1]
        before = starts[index - 1] if index else -1
        if before in self._free:
            size += self._drop_free(before)
            warm += self._pop_warm(before)
            self._blocks.pop(offset, None)
            del starts[index]
            offset = before
        self._add_free(offset, size, warm)
        while self._warm_bytes > _WARM_BYTES:
            oldest = next(iter(self._warm))
            self.segment.discard(oldest, self._free[oldest])
            self._pop_warm(oldest)

    def _add_free(self, offset: int, size: int, warm: int) -> None:
        self._free[offset] = size
        insort(self._free_keys, size << _ORDINAL_SHIFT | offset)
        if warm:
            self._warm[offset] = warm
            self._warm_bytes += warm

    def _drop_free(self, offset: int) -> int:
        size = self._free.pop(offset)
        del self._free_keys[bisect_left(self._free_keys, size << _ORDINAL_SHIFT | offset)]
        return size

    def _pop_warm(self, offset: int) -> int:
        warm = self._warm.pop(offset, 0)
        self._warm_bytes -= warm
        return warm

    def _bury(self) -> None:
        """Free what the garbage collector abandoned."""
        while self._abandoned:
            allocation = self._abandoned.popleft()
            if allocation.live:
                self._retire(allocation, None)

    def _poison(self, offset: int, size: int) -> None:
        self.bytes[offset : offset + min(size, _POISON_BYTES)].fill(_POISON)

    # --------------------------------------------------------------------------------------------------------- messages
    def _block_at(self, offset: int) -> Allocation | None:
        """Return the newest allocation of the block that contains `offset`."""
        with self._lock:
            if not 0 <= offset < self._top:
                return None
            return self._blocks.get(self._starts[bisect_right(self._starts, offset) - 1])

    def _illegal(self, address: int, nbytes: int, what: str, allocation: Allocation | None) -> DeviceError:
        ordinal = ordinal_of(address)
        if ordinal is None:
            where = "is null" if address == 0 else "is a host address, not device memory"
            return IllegalAddressError(f"{self.name}: illegal memory access: {what}: address {address:#x} {where}")
        mine = ordinal_of(self.base)
        if ordinal != mine:
            return IllegalAddressError(
                f"{self.name}: wrong device: {what}: address {address:#x} belongs to device {ordinal}"
            )
        if allocation is not None and address < allocation.address + allocation.size:
            if not allocation.live:
                inside = "" if address == allocation.address else f" inside address {allocation.address:#x}"
                return IllegalAddressError(
                    f"{self.name}: use after free: {what}: address {address:#x}{inside} ({allocation.nbytes} bytes) "
                    f"{allocation.freed()}"
                )
            beyond = address + nbytes - allocation.address - allocation.nbytes
            return IllegalAddressError(
                f"{self.name}: out of bounds: {what} of {nbytes} bytes at {address:#x} ends {beyond} bytes past the "
                f"end of a {allocation.nbytes}-byte allocation made at {describe(allocation.site)}"
            )
        state = "was freed" if address - self.base < self._top else "was never allocated"
        return IllegalAddressError(f"{self.name}: illegal memory access: {what}: address {address:#x} {state}")

    def _out_of_memory(self, nbytes: int) -> OutOfMemoryError:
        left = self.capacity - self._used
        most = sorted((a for a in self._blocks.values() if a.live), key=lambda a: -a.size)[:3]
        held = ", ".join(f"{a.nbytes} at {describe(a.site)}" for a in most)
        pieces = " in pieces that are too small" if left >= nbytes else ""
        return OutOfMemoryError(
            f"{self.name}: out of memory: {nbytes} bytes asked for, {left} of {self.capacity} bytes left"
            f"{pieces}{f'; largest allocations: {held}' if held else ''}"
        )
