"""What a collective is: which chunks every rank holds before and after, and the same on NumPy arrays.

A chunk of meaning is called an item. `before` and `after` are tables (ranks, slots) of item numbers, -1 where there is
nothing or where it does not matter. A result must hold its item with the contributions of exactly the ranks that held
a share of that item before; this one rule covers sums (all ranks hold a share of item k) and moves (one rank holds
it). Item k of every collective but all_to_all is chunk k of the whole buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hccl.errors import ArgumentError
from hccl.schedule import IntArray

Layout = Literal["whole", "part", "root", "by destination", "by source"]


@dataclass(frozen=True)
class Collective:
    """A collective's pre- and postcondition.

    Layouts: "whole" = every rank has all chunks, "part" = rank r has the r-th of `ranks` equal parts, "root" = the
    root has all chunks and the others nothing, "by destination" and "by source" = all_to_all's send and receive
    buffers.
    """

    name: str
    before: Layout
    after: Layout
    reduces: bool = False

    @property
    def rooted(self) -> bool:
        """Whether it has a root."""
        return "root" in (self.before, self.after)

    def bus_factor(self, ranks: int) -> float:
        """Bytes through a rank's port per byte of the whole buffer: busbw = algbw times this, as in nccl-tests."""
        if self.name in ("broadcast", "reduce"):
            return 1.0
        return (2 if self.name == "all_reduce" else 1) * (ranks - 1) / ranks


COLLECTIVES: dict[str, Collective] = {
    c.name: c
    for c in (
        Collective("all_reduce", "whole", "whole", reduces=True),
        Collective("all_gather", "part", "whole"),
        Collective("reduce_scatter", "whole", "part", reduces=True),
        Collective("broadcast", "root", "whole"),
        Collective("reduce", "whole", "root", reduces=True),
        Collective("scatter", "root", "part"),
        Collective("gather", "part", "root"),
        Collective("all_to_all", "by destination", "by source"),
    )
}


def collective(op: str) -> Collective:
    """Look a collective up by name.

    Raises: ArgumentError with the names there are.
    """
    try:
        return COLLECTIVES[op]
    except KeyError:
        raise ArgumentError(f"no collective {op!r}: there are {', '.join(COLLECTIVES)}") from None


def _table(layout: Layout, ranks: int, chunks: int, root: int) -> IntArray:
    if layout == "whole":
        return np.tile(np.arange(chunks), (ranks, 1))
    if layout == "root":
        table = np.full((ranks, chunks), -1)
        table[root] = np.arange(chunks)
        return table
    if chunks % ranks:
        raise ArgumentError(f"{chunks} chunks cannot be split over {ranks} ranks evenly")
    if layout == "part":
        return np.arange(chunks).reshape(ranks, -1)
    sent = np.arange(ranks * chunks).reshape(ranks, ranks, -1)  # (sender, receiver, chunk)
    if layout == "by source":
        sent = sent.swapaxes(0, 1)
    return sent.reshape(ranks, chunks)


def before(op: str, ranks: int, chunks: int, root: int = 0) -> IntArray:
    """Give the item in each input slot, (ranks, n_in); -1 where a rank has no input.

    >>> before("scatter", 2, 2, root=1)
    array([[-1, -1],
           [ 0,  1]])
    """
    return _table(collective(op).before, ranks, chunks, root)


def after(op: str, ranks: int, chunks: int, root: int = 0) -> IntArray:
    """Give the item that each output slot must end with, (ranks, n_out); -1 where a rank has no result.

    >>> after("scatter", 2, 2, root=1)
    array([[0],
           [1]])
    """
    return _table(collective(op).after, ranks, chunks, root)


_REDUCERS: dict[str, Callable[..., Any]] = {
    "sum": np.add.reduce,
    "prod": np.multiply.reduce,
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
}


def _combine(inputs: Sequence[Any], reduce_op: str) -> Any:
    """Reduce over ranks: floats in float64 with one rounding at the end, integers in their own wrapping arithmetic."""
    if reduce_op not in _REDUCERS:
        raise ArgumentError(f"no reduce operation {reduce_op!r}: there are {', '.join(_REDUCERS)}")
    own = np.asarray(inputs[0]).dtype
    wide = own if own.kind in "iu" else np.dtype(np.float64)
    stacked = np.stack([np.asarray(x).astype(wide) for x in inputs])
    return _REDUCERS[reduce_op](stacked, axis=0, dtype=wide).astype(own)


def oracle(op: str, inputs: Sequence[Any], reduce_op: str = "sum", root: int = 0) -> list[Any]:
    """Give what every rank holds after the collective, by NumPy alone: for tests and benchmarks.

    inputs: one array per rank, in rank order (ranks without input: anything). The first axis is split and joined.
    Returns one array per rank, None for ranks without a result.
    Raises: ArgumentError for an unknown name, or a first axis that the ranks cannot share evenly.

    >>> oracle("reduce_scatter", [np.array([1, 2]), np.array([10, 20])])
    [array([11]), array([22])]
    """
    ranks = len(inputs)
    spec = collective(op)

    def parts(x: Any) -> list[Any]:
        if len(x) % ranks:
            raise ArgumentError(f"{op}: a first axis of {len(x)} is not divisible by {ranks} ranks")
        return np.split(np.asarray(x), ranks)

    if spec.before == "by destination":
        sent = [parts(x) for x in inputs]
        return [np.concatenate([sent[source][rank] for source in range(ranks)]) for rank in range(ranks)]
    if spec.reduces:
        whole = _combine(inputs, reduce_op)
    elif spec.before == "root":
        whole = np.asarray(inputs[root])
    else:
        whole = np.concatenate([np.asarray(x) for x in inputs])
    if spec.after == "part":
        return parts(whole)
    return [whole.copy() if spec.after == "whole" or rank == root else None for rank in range(ranks)]
