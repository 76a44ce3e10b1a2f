"""A schedule: who moves which chunk to whom, step by step, as plain tables of integers.

Meaning of the tables. Every rank has slots of one chunk each, numbered through its input, output and scratch buffers.
The rows of a step read the slots as they were before the step. A row starts when both of its ranks have entered the
step; a rank enters the next step when its own rows are done; there is no global barrier. A row with `src == dst` is
local work. Sends and receives match by construction, since one row is both. Reducing rows are done by the receiving
rank, in the order in which they stand in the table: that order is the order of the floating-point sum.

Nothing here knows of devices, transports, threads or clocks; `execute`, `simulate`, `verify` and `render` interpret it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]

COPY = 0
REDUCE = 1


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A table of transfers that start from one state of the buffers; one row per transfer.

    Row i moves the `count[i]` chunks in slots `src_slot[i] + k * stride[i]` of rank `src[i]` to the slots `dst_slot[i]
    + k * stride[i]` of rank `dst[i]` (k = 0 … count-1). `op` is COPY (overwrite) or REDUCE (combine with what stands
    there). `lane` names an engine of the rank that works beside its others, as intra-server beside inter-server. `by`
    says who moves the bytes of copy rows: "dst" pulls, "src" pushes. Reducing rows are always moved by `dst`.
    """

    src: IntArray
    dst: IntArray
    src_slot: IntArray
    dst_slot: IntArray
    stride: IntArray
    count: IntArray
    op: IntArray
    lane: IntArray
    by: Literal["src", "dst"]

    @classmethod
    def of(
        cls,
        src: ArrayLike,
        dst: ArrayLike,
        src_slot: ArrayLike,
        dst_slot: ArrayLike,
        *,
        stride: ArrayLike = 1,
        count: ArrayLike = 1,
        op: ArrayLike = COPY,
        lane: ArrayLike = 0,
        by: Literal["src", "dst"] | None = None,
    ) -> Step:
        """Make a step from lists, arrays and scalars; scalars hold for every row.

        Without `by`, steps that reduce are pulled by the receiver and pure copies are pushed by the sender.

        >>> Step.of([0, 1], [1, 0], 0, 1).dst_slot
        array([1, 1])
        """
        columns = [np.asarray(column) for column in (src, dst, src_slot, dst_slot, stride, count, op, lane)]
        table = np.empty((len(columns), np.broadcast(*columns).size), dtype=np.int64)
        for row, column in zip(table, columns, strict=True):
            row[...] = column
        table.flags.writeable = False
        a, b, c, d, e, f, g, h = table
        if by is None:
            by = "dst" if bool((g == REDUCE).any()) else "src"
        return cls(a, b, c, d, e, f, g, h, by)

    def __len__(self) -> int:
        return len(self.src)

    def select(self, rows: Any) -> Step:
        """Give the step of only these rows (a mask or indices), in the given order.

        What rank r takes part in is `step.select((step.src == r) | (step.dst == r))`.
        """
        return Step(
            self.src[rows],
            self.dst[rows],
            self.src_slot[rows],
            self.dst_slot[rows],
            self.stride[rows],
            self.count[rows],
            self.op[rows],
            self.lane[rows],
            self.by,
        )


@dataclass(frozen=True, eq=False)
class Schedule:
    """One collective over `ranks` ranks as a lazily made sequence of steps.

    `chunks` is the number of equal pieces that the whole (gathered, unsplit) buffer of the collective is cut in. A
    rank has `n_in` input, `n_out` output and `n_scratch` scratch slots of one chunk each; slot numbers run through the
    three in this order. The input is never written, and ranks without a result (`reduce`, `gather` off the root) have
    no output. With `in_place_ok` input slot k and output slot k may be the same memory.

    `sum_from = (a, b)` promises the order of sums: chunk c is added up from rank a + b·c (mod ranks) upwards, one rank
    at a time, cyclically. None promises only that all ranks that receive a sum receive the same one, to the bit.
    """

    op: str
    algo: str
    ranks: int
    chunks: int
    n_in: int
    n_out: int
    n_scratch: int
    source: Callable[[], Iterable[Step]]
    root: int = 0
    in_place_ok: bool = False
    sum_from: tuple[int, int] | None = None

    def steps(self) -> Iterator[Step]:
        """Make the steps, first to last. Each call starts anew; only what is asked for is made."""
        return iter(self.source())

    @property
    def slots(self) -> int:
        """Number of slots of one rank, over its three buffers."""
        return self.n_in + self.n_out + self.n_scratch

    def slot_name(self, slot: int) -> str:
        """Say a slot number as buffer and index, as people read it: `out[3]`."""
        first = 0
        for name, size in (("in", self.n_in), ("out", self.n_out), ("scratch", self.n_scratch)):
            if first <= slot < first + size:
                return f"{name}[{slot - first}]"
            first += size
        return f"slot {slot} of {self.slots}"


def repeat(step: Step, times: int, shift: int, window: tuple[int, int]) -> Iterator[Step]:
    """Give `step` `times` times, each time with its slots moved on by `shift` chunks.

    `window` is (first slot, number of slots): slots move cyclically within it, and all slots of `step` lie in it. Ring
    algorithms are one step and this. The other columns are the very same arrays in all steps, by which interpreters
    recognise that what they worked out for one step holds for the next.

    >>> step = Step.of([0, 1], [1, 0], [4, 5], [4, 5])
    >>> [s.src_slot.tolist() for s in repeat(step, 3, -1, (4, 2))]
    [[4, 5], [5, 4], [4, 5]]
    """
    first, size = window
    for i in range(times):
        src_slot = first + (step.src_slot - first + i * shift) % size
        dst_slot = first + (step.dst_slot - first + i * shift) % size
        yield Step(step.src, step.dst, src_slot, dst_slot, step.stride, step.count, step.op, step.lane, step.by)
