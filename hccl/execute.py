"""How does a program become memory operations? Places get addresses, chains get cut in tiles.

`Geometry` says where each slot lies in a buffer of so many elements; `bind` turns the epochs of a program into lists of
(function, arguments) that do the work without further thought: ready NumPy views, ready ufuncs. Slicing inside the call
would cost more than small operations take, so bindings are cached by the communicator per call shape.

A tile is 128 KiB: with two operands it stays in a 1 MiB L2, and a reduced tile is pushed to the peers while it is
there. Measured: 32 KiB loses to call overhead, 64 KiB to 1 MiB are equal within noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import setitem
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hccl.program import IN, OUT, Action, Epoch, Place
from hccl.reduce import Operation, reduce_operations
from hccl.schedule import Schedule
from hccl.types import ReduceOp

TILE_BYTES = 128 * 1024
_LISTED_OPERATIONS = 8192  # longer lists are generated while they run: the views would take megabytes
_SLICE_ALIGN = 128  # HCCL rounds the slices of unsplit buffers up to this many bytes (HCCL_MIN_SLICE_ALIGN)
_SMALL_COPY = 16 * 1024  # np.copyto lets other threads run meanwhile, worth it above this size
_ALL = slice(None)
_UNSPLIT = ("all_reduce", "broadcast", "reduce")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Geometry:
    """Where the chunks of a call lie: chunk k of the whole buffer is bytes [edges[k], edges[k + 1])."""

    edges: tuple[int, ...]
    chunk_bytes: int  # of the largest chunk: the size of a scratch slot

    @classmethod
    def of(cls, schedule: Schedule, whole_bytes: int, itemsize: int) -> Geometry:
        """Cut `whole_bytes` (gathered, unsplit) as the operation demands; the tail of unsplit buffers may be short."""
        chunks = schedule.chunks
        size = -(-whole_bytes // chunks)
        if schedule.op in _UNSPLIT and chunks > 1:
            align = max(_SLICE_ALIGN, itemsize)
            size = -(-size // align) * align
        edges = tuple(min(k * size, whole_bytes) for k in range(chunks + 1))
        return cls(edges, size)

    def span(self, schedule: Schedule, place: Place) -> tuple[int, int]:
        """Return (offset, size) in bytes of a slot in its buffer; scratch slots are of full size."""
        if place.kind == IN or place.kind == OUT:
            slots = schedule.n_in if place.kind == IN else schedule.n_out
            if slots == len(self.edges) - 1:
                return self.edges[place.index], self.edges[place.index + 1] - self.edges[place.index]
        return place.index * self.chunk_bytes, self.chunk_bytes


@dataclass(frozen=True)
class Addresses:
    """First bytes of the in, out and scratch buffers of every rank, as device addresses."""

    buffers: tuple[tuple[int, int, int], ...]  # per rank: in, out, scratch

    def of(self, place: Place) -> int:
        """Return the address that `place`'s buffer starts at."""
        return self.buffers[place.rank][place.kind]


Viewer = Callable[[int, int, int], Bytes | None]  # (rank, address, nbytes) -> memory in place, None if not reachable


class Binder:
    """Turns actions into operations for one call shape and one set of addresses."""

    def __init__(
        self,
        schedule: Schedule,
        geometry: Geometry,
        addresses: Addresses,
        view: Viewer,
        dtype: np.dtype[Any],
        wide: np.dtype[Any],
        op: ReduceOp,
    ) -> None:
        self.schedule = schedule
        self.geometry = geometry
        self.addresses = addresses
        self.view = view
        self.dtype = dtype
        self.wide = wide
        self.op = op

    def memory(self, place: Place, nbytes: int | None = None) -> Bytes | None:
        """The bytes of a slot in place, cut to `nbytes`."""
        offset, size = self.geometry.span(self.schedule, place)
        return self.view(place.rank, self.addresses.of(place) + offset, size if nbytes is None else nbytes)

    def size(self, action: Action) -> int:
        """Bytes that an action moves: scratch slots may be larger than what they hold."""
        spans = (self.geometry.span(self.schedule, p)[1] for p in (action.source, action.target))
        return min(spans)

    def operations(self, epoch: Epoch) -> Iterable[Operation]:
        """Return what an epoch without messages does, in order."""
        chains = [self._links(chain) for chain in epoch.chains]
        total = sum(len(links) * max(1, -(-nbytes // TILE_BYTES)) for links, nbytes in chains)
        if total > _LISTED_OPERATIONS:
            return _Lazy(self, chains)
        return [operation for links, nbytes in chains for operation in self._tiles(links, nbytes)]

    # ------------------------------------------------------------------------------------------------------ chains
    def _links(self, chain: list[Action]) -> tuple[list[_Link], int]:
        """Merge a chain's actions into copies and reduce groups: copy a→d, add b→d becomes d = a + b."""
        links: list[_Link] = []
        longest = 0
        for action in chain:
            nbytes = self.size(action)
            if nbytes == 0:
                continue
            longest = max(longest, nbytes)
            source, target = self.memory(action.source, nbytes), self.memory(action.target, nbytes)
            assert source is not None
            assert target is not None
            last = links[-1] if links else None
            if not action.reduce:
                if source.ctypes.data != target.ctypes.data:
                    links.append(_Link(target, [source]))
            elif last is not None and last.is_on(target):
                last.sources.append(source)
            else:
                links.append(_Link(target, [target, source]))
        return links, longest

    def _tiles(self, links: list[_Link], nbytes: int) -> Iterator[Operation]:
        step = nbytes if len(links) == 1 and len(links[0].sources) == 1 else TILE_BYTES
        for start in range(0, nbytes, max(step, 1)):
            for link in links:
                yield from self._tile(link, slice(start, start + step))

    def _tile(self, link: _Link, part: slice) -> list[Operation]:
        target = link.target[part]
        if not len(target):
            return []
        if len(link.sources) == 1:
            return [copy_operation(target, link.sources[0][part])]
        typed = [source[part].view(self.dtype) for source in link.sources]
        return reduce_operations(self.op, target.view(self.dtype), typed, self.wide)


def copy_operation(target: Bytes, source: Bytes) -> Operation:
    """Copy `source` over `target`. Small copies go without NumPy, which takes four times as long to begin."""
    if len(target) > _SMALL_COPY:
        return np.copyto, (target, source)
    return setitem, (target.data, _ALL, source.data)


class _Link:
    """target = sources[0] (+ sources[1] …), for all tiles alike."""

    __slots__ = ("sources", "target")

    def __init__(self, target: Bytes, sources: list[Bytes]) -> None:
        self.target = target
        self.sources = sources

    def is_on(self, target: Bytes) -> bool:
        return self.target.ctypes.data == target.ctypes.data and len(self.target) == len(target)


class _Lazy:
    """Operations that are made while they run, again at each run."""

    def __init__(self, binder: Binder, chains: list[tuple[list[_Link], int]]) -> None:
        self._binder = binder
        self._chains = chains

    def __iter__(self) -> Iterator[Operation]:
        for links, nbytes in self._chains:
            yield from self._binder._tiles(links, nbytes)
