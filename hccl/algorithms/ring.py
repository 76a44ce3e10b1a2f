"""Ring: every rank talks to its two neighbours only; bandwidth-optimal, latency grows with the number of ranks.

Costs (HCCL's table; n = bytes of the whole buffer, p = ranks):
    reduce_scatter (p-1)α + (p-1)/p·n(β+γ)      all_gather, scatter, gather (p-1)α + (p-1)/p·nβ
    all_reduce 2(p-1)α + 2(p-1)/p·nβ + (p-1)/p·nγ     broadcast (p-1)(α+nβ)     reduce (p-1)(α+nβ+nγ)
Source: HCCL algorithm documentation and the Ring templates of the open-source HCCL (data moves from rank r to rank
r+1).

Where partial results travel through a rank that must not keep them, two scratch slots take turns: a rank receives into
one while its neighbour reads the other. "Own share + what arrives" is written as a local copy followed by a reducing
row into the same slot, which an executor does in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hccl.schedule import REDUCE, Schedule, Step, repeat


def _scratch_slots(ranks: int) -> int:
    """Slots that a chunk needs on its way through: none on a direct way, else at most two in turn."""
    return min(max(ranks - 2, 0), 2)


def all_reduce(ranks: int) -> Schedule:
    """Reduce-scatter round the ring, then all-gather round the ring, both in the output buffer."""
    me = np.arange(ranks)
    right = (me + 1) % ranks
    out = (ranks, ranks)

    def steps() -> Iterator[Step]:
        yield Step.of(me, me, 0, ranks, count=ranks)
        slot = ranks + (me - 1) % ranks
        yield from repeat(Step.of(me, right, slot, slot, op=REDUCE), ranks - 1, -1, out)
        slot = ranks + me
        yield from repeat(Step.of(me, right, slot, slot, by="dst"), ranks - 1, -1, out)

    return Schedule("all_reduce", "ring", ranks, ranks, ranks, ranks, 0, steps, in_place_ok=True, sum_from=(1, 1))


def all_gather(ranks: int) -> Schedule:
    """Send the own chunk on, then forward what came from the left, until everybody has everything."""
    me = np.arange(ranks)
    right = (me + 1) % ranks

    def steps() -> Iterator[Step]:
        if ranks == 1:
            yield Step.of(0, 0, 0, 1)
            return
        both = np.concatenate([me, me])
        yield Step.of(both, np.concatenate([me, right]), 0, 1 + both, by="dst")
        slot = 1 + (me - 1) % ranks
        yield from repeat(Step.of(me, right, slot, slot, by="dst"), ranks - 2, -1, (1, ranks))

    return Schedule("all_gather", "ring", ranks, ranks, 1, ranks, 0, steps)


def reduce_scatter(ranks: int) -> Schedule:
    """Pass partial sums round: the sum of chunk c starts at rank c+1, collects each rank's share and ends at rank c."""
    me = np.arange(ranks)
    left = (me - 1) % ranks
    out, scratch = ranks, ranks + 1

    def steps() -> Iterator[Step]:
        if ranks == 1:
            yield Step.of(0, 0, 0, out)
        for i in range(ranks - 1):
            chunk = (me - 2 - i) % ranks
            arrives = np.full(ranks, scratch + (i - 1) % 2) if i else chunk
            target = out if i == ranks - 2 else scratch + i % 2
            yield Step.of(
                np.concatenate([me, left]),
                np.concatenate([me, me]),
                np.concatenate([chunk, arrives]),
                target,
                op=np.repeat([0, REDUCE], ranks),
                by="dst",
            )

    return Schedule("reduce_scatter", "ring", ranks, ranks, ranks, 1, _scratch_slots(ranks), steps, sum_from=(1, 1))


def broadcast(ranks: int, root: int = 0) -> Schedule:
    """Store and forward the full buffer from the root to the right."""

    def steps() -> Iterator[Step]:
        right = (root + 1) % ranks
        yield Step.of(root, [root, right] if ranks > 1 else root, 0, 1, by="dst")
        for hop in range(1, ranks - 1):
            yield Step.of((root + hop) % ranks, (root + hop + 1) % ranks, 1, 1, by="dst")

    return Schedule("broadcast", "ring", ranks, 1, 1, 1, 0, steps, root=root, in_place_ok=True)


def reduce(ranks: int, root: int = 0) -> Schedule:
    """Chain from the root's right neighbour round to the root: each rank adds its own and forwards the sum."""
    out, scratch = 1, 2

    def steps() -> Iterator[Step]:
        if ranks == 1:
            yield Step.of(0, 0, 0, out)
        for hop in range(1, ranks):
            src, dst = (root + hop) % ranks, (root + hop + 1) % ranks
            target = out if dst == root else scratch
            yield Step.of([dst, src], dst, [0, 0 if hop == 1 else scratch], target, op=[0, REDUCE], by="dst")

    n_scratch = min(_scratch_slots(ranks), 1)
    first = (root + 1, 0)
    return Schedule("reduce", "ring", ranks, 1, 1, 1, n_scratch, steps, root=root, in_place_ok=True, sum_from=first)


def scatter(ranks: int, root: int = 0) -> Schedule:
    """Pump the chunks into the root's right neighbour, farthest first; each rank forwards all but its own, the last."""
    out, scratch = ranks, ranks + 1
    far = np.arange(1, ranks)  # distance from the root

    def steps() -> Iterator[Step]:
        yield Step.of(root, root, root, out)
        for i in range(ranks - 1):
            d = far[: i + 1]
            src_slot = np.full(len(d), scratch + (i - 1) % 2)
            src_slot[0] = (root - 1 - i) % ranks
            target = out if i == ranks - 2 else scratch + i % 2
            yield Step.of((root + d - 1) % ranks, (root + d) % ranks, src_slot, target, by="dst")

    return Schedule("scatter", "ring", ranks, ranks, ranks, 1, _scratch_slots(ranks), steps, root=root)


def gather(ranks: int, root: int = 0) -> Schedule:
    """Send the own chunk to the right, then forward what comes from the left; the root keeps what arrives."""
    out, scratch = 1, 1 + ranks

    def steps() -> Iterator[Step]:
        yield Step.of(root, root, 0, out + root)
        for i in range(ranks - 1):
            d = np.arange(i + 1, ranks)  # distance from the root of those that still have something to send
            dst_slot = np.full(len(d), scratch + i % 2)
            dst_slot[-1] = out + (root - 1 - i) % ranks
            src_slot = scratch + (i - 1) % 2 if i else 0
            yield Step.of((root + d) % ranks, (root + d + 1) % ranks, src_slot, dst_slot, by="dst")

    return Schedule("gather", "ring", ranks, ranks, 1, ranks, _scratch_slots(ranks), steps, root=root)


BUILDERS: dict[str, Callable[..., Schedule]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "reduce": reduce,
    "scatter": scatter,
    "gather": gather,
}
