"""Mesh: every rank talks to every other at once, over a link per pair; what HCCL does inside an A2 server.

Costs (HCCL's table; n = bytes of the whole buffer, p = ranks):
    all_gather, scatter, gather, all_to_all α + nβ/p     reduce_scatter α + nβ/p + (p-1)/p·nγ     broadcast 2α + 2nβ/p
    all_reduce, reduce 2α + 2nβ/p + (p-1)/p·nγ
    one_shot: broadcast α + nβ     all_reduce, reduce α + nβ + (p-1)nγ
Source: HCCL algorithm documentation and the Mesh templates of the open-source HCCL.

Sums are made in a fixed order: two-phase algorithms add chunk c from rank c upwards (each owner begins with its own
share and its right neighbour, so that no rank is asked by all at once), one-shot ones from rank 0 upwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hccl.schedule import REDUCE, IntArray, Schedule, Step


def _pairs(ranks: int) -> tuple[IntArray, IntArray]:
    """All ordered pairs of different ranks as (rank, peer): for each rank its peers r+1, r+2, … (mod ranks)."""
    rank = np.repeat(np.arange(ranks), ranks - 1)
    return rank, (rank + np.tile(np.arange(1, ranks), ranks)) % ranks


def _in_rank_order(ranks: int, into: IntArray | int, slot: int, out: int) -> Step:
    """Sum slot `slot` of ranks 0, 1, 2, … into slot `out` of each rank of `into`: a copy, then reductions."""
    dst = np.repeat(into, ranks)
    src = np.tile(np.arange(ranks), len(dst) // ranks)
    return Step.of(src, dst, slot, out, op=np.where(src == 0, 0, REDUCE), by="dst")


def all_reduce(ranks: int, one_shot: bool = False) -> Schedule:
    """Each rank sums one chunk of all, then hands the sum to all; one_shot: each rank sums the full buffers of all."""
    me = np.arange(ranks)
    rank, peer = _pairs(ranks)

    def two_phase() -> Iterator[Step]:
        yield Step.of(me, me, me, ranks + me)
        yield Step.of(peer, rank, rank, ranks + rank, op=REDUCE)
        yield Step.of(rank, peer, ranks + rank, ranks + rank, by="src")

    def at_once() -> Iterator[Step]:
        yield Step.of(me, me, 0, 2)
        yield _in_rank_order(ranks, me, 2, 1)

    if one_shot:
        return Schedule("all_reduce", "mesh", ranks, 1, 1, 1, 1, at_once, in_place_ok=True, sum_from=(0, 0))
    return Schedule("all_reduce", "mesh", ranks, ranks, ranks, ranks, 0, two_phase, in_place_ok=True, sum_from=(0, 1))


def all_gather(ranks: int) -> Schedule:
    """Write the own chunk to everybody."""
    me = np.arange(ranks)
    rank, peer = _pairs(ranks)

    def steps() -> Iterator[Step]:
        src = np.concatenate([me, rank])
        yield Step.of(src, np.concatenate([me, peer]), 0, 1 + src, by="src")

    return Schedule("all_gather", "mesh", ranks, ranks, 1, ranks, 0, steps)


def reduce_scatter(ranks: int) -> Schedule:
    """Read one's own chunk from everybody and add it up."""
    me = np.arange(ranks)
    rank, peer = _pairs(ranks)

    def steps() -> Iterator[Step]:
        yield Step.of(me, me, me, ranks)
        yield Step.of(peer, rank, rank, ranks, op=REDUCE)

    return Schedule("reduce_scatter", "mesh", ranks, ranks, ranks, 1, 0, steps, sum_from=(0, 1))


def broadcast(ranks: int, root: int = 0, one_shot: bool = False) -> Schedule:
    """Scatter from the root, then all-gather; one_shot: everybody reads the full buffer of the root."""
    me = np.arange(ranks)
    rank, peer = _pairs(ranks)
    chunks = 1 if one_shot else ranks

    def two_phase() -> Iterator[Step]:
        slot, count = np.where(me == root, 0, me), np.where(me == root, ranks, 1)  # the root itself needs all chunks
        yield Step.of(root, me, slot, ranks + slot, count=count, by="dst")
        yield Step.of(rank, peer, ranks + rank, ranks + rank, by="src").select(peer != root)

    def at_once() -> Iterator[Step]:
        yield Step.of(root, me, 0, 1, by="dst")

    steps = at_once if one_shot else two_phase
    return Schedule("broadcast", "mesh", ranks, chunks, chunks, chunks, 0, steps, root=root, in_place_ok=True)


def reduce(ranks: int, root: int = 0, one_shot: bool = False) -> Schedule:
    """Each rank sums one chunk of all, then the root gathers the sums; one_shot: the root sums all full buffers."""
    me = np.arange(ranks)
    rank, peer = _pairs(ranks)
    others = np.delete(me, root)
    scratch = 2 * ranks
    partial = np.where(me == root, ranks + root, scratch)  # ranks without a result have no output to sum in

    def two_phase() -> Iterator[Step]:
        yield Step.of(me, me, me, partial)
        yield Step.of(peer, rank, rank, partial[rank], op=REDUCE)
        yield Step.of(others, root, scratch, ranks + others, by="src")

    def at_once() -> Iterator[Step]:
        yield Step.of(me, me, 0, 2)
        yield _in_rank_order(ranks, root, 2, 1)

    if one_shot:
        return Schedule("reduce", "mesh", ranks, 1, 1, 1, 1, at_once, root=root, in_place_ok=True, sum_from=(0, 0))
    n_scratch = int(ranks > 1)
    return Schedule(
        "reduce", "mesh", ranks, ranks, ranks, ranks, n_scratch, two_phase, root=root, in_place_ok=True, sum_from=(0, 1)
    )


def scatter(ranks: int, root: int = 0) -> Schedule:
    """Read the own chunk from the root."""
    me = np.arange(ranks)

    def steps() -> Iterator[Step]:
        yield Step.of(root, me, me, ranks, by="dst")

    return Schedule("scatter", "mesh", ranks, ranks, ranks, 1, 0, steps, root=root)


def gather(ranks: int, root: int = 0) -> Schedule:
    """Write the own chunk to the root."""
    me = np.arange(ranks)

    def steps() -> Iterator[Step]:
        yield Step.of(me, root, 0, 1 + me, by="src")

    return Schedule("gather", "mesh", ranks, ranks, 1, ranks, 0, steps, root=root)


def all_to_all(ranks: int) -> Schedule:
    """Write to everybody the chunk meant for it."""
    me = np.arange(ranks)
    rank, peer = _pairs(ranks)

    def steps() -> Iterator[Step]:
        src, dst = np.concatenate([me, rank]), np.concatenate([me, peer])
        yield Step.of(src, dst, dst, ranks + src, by="src")

    return Schedule("all_to_all", "mesh", ranks, ranks, ranks, ranks, 0, steps)


BUILDERS: dict[str, Callable[..., Schedule]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "reduce": reduce,
    "scatter": scatter,
    "gather": gather,
    "all_to_all": all_to_all,
}
