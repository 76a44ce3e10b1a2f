"""Which tokens of a sequence does each rank hold? Three layouts, each one a list of index arrays.

    contiguous   rank r holds the r-th of P equal stretches            0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3
    zigzag       rank r holds chunks r and 2P-1-r of 2P chunks         0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0
    striped      rank r holds every P-th token, from r                 0 1 2 3 0 1 2 3 0 1 2 3 0 1 2 3

With a causal mask later tokens cost more, so contiguous leaves the first ranks idle: at best P / (2P-1) of the time is
work. Zigzag pairs an early with a late chunk and is balanced exactly, striped up to one token per rank.

Any length works: stretch i of n begins at floor(S * i / n). Shards differ by one layout unit at most (two tokens for
zigzag) and may be empty. Positions are ascending within a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hccl.errors import ArgumentError

Positions = NDArray[np.int64]


def _contiguous(length: int, rank: int, size: int) -> Positions:
    return np.arange(length * rank // size, length * (rank + 1) // size)


def _zigzag(length: int, rank: int, size: int) -> Positions:
    mirrored = 2 * size - 1 - rank
    return np.concatenate([_contiguous(length, rank, 2 * size), _contiguous(length, mirrored, 2 * size)])


def _striped(length: int, rank: int, size: int) -> Positions:
    return np.arange(rank, length, size)


LAYOUTS: dict[str, Callable[[int, int, int], Positions]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "striped": _striped,
}


def positions(length: int, rank: int, size: int, layout: str) -> Positions:
    """Return the places in the whole sequence of the tokens that `rank` of `size` holds, ascending, int64.

    Raises: `ArgumentError` for an unknown layout, a rank outside 0 ... size-1 or a negative length.

    >>> [positions(7, rank, 2, "zigzag").tolist() for rank in range(2)]
    [[0, 5, 6], [1, 2, 3, 4]]
    """
    check_layout(layout)
    if size < 1 or not 0 <= rank < size:
        raise ArgumentError(f"rank {rank} of {size}: expected 0 <= rank < size")
    if length < 0:
        raise ArgumentError(f"a sequence of {length} tokens")
    return LAYOUTS[layout](length, rank, size).astype(np.int64, copy=False)


def lengths(length: int, size: int, layout: str) -> list[int]:
    """Return how many of `length` tokens each rank holds."""
    return [positions(length, rank, size, layout).size for rank in range(size)]


def shard(x: ArrayLike, rank: int, size: int, axis: int, layout: str) -> NDArray[Any]:
    """Cut the part of `rank` out of the whole array `x` along `axis`; returns a contiguous copy.

    >>> shard(np.arange(8), 1, 2, axis=0, layout="striped")
    array([1, 3, 5, 7])
    """
    x = np.asarray(x)
    axis = _axis(axis, x.ndim)
    return np.ascontiguousarray(np.take(x, positions(x.shape[axis], rank, size, layout), axis=axis))


def unshard(parts: Sequence[ArrayLike], axis: int, layout: str) -> NDArray[Any]:
    """Put the parts of all ranks, in rank order, back together along `axis`: the inverse of `shard`.

    Raises: `ArgumentError` when the parts cannot come from `shard` with this layout; the message names the rank.

    >>> unshard([[0, 2, 4], [1, 3]], axis=0, layout="striped")
    array([0, 1, 2, 3, 4])
    """
    arrays = [np.asarray(part) for part in parts]
    if not arrays:
        raise ArgumentError("unshard: no parts")
    axis = _axis(axis, arrays[0].ndim)
    for rank, part in enumerate(arrays):
        if part.dtype != arrays[0].dtype:
            raise ArgumentError(f"unshard: the part of rank {rank} is {part.dtype}, of rank 0 {arrays[0].dtype}")
        if part.ndim != arrays[0].ndim or _without(part.shape, axis) != _without(arrays[0].shape, axis):
            raise ArgumentError(f"unshard: the part of rank {rank} has shape {part.shape}, of rank 0 {arrays[0].shape}")
    total = sum(part.shape[axis] for part in arrays)
    whole = np.empty((*arrays[0].shape[:axis], total, *arrays[0].shape[axis + 1 :]), arrays[0].dtype)
    for rank, part in enumerate(arrays):
        places = positions(total, rank, len(arrays), layout)
        check_length("unshard", rank, part.shape[axis], len(places), total, len(arrays), layout)
        whole[(slice(None),) * axis + (places,)] = part
    return whole


def check_layout(layout: str) -> None:
    """Raise `ArgumentError` for an unknown layout."""
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout {layout!r} is unknown; there are {', '.join(map(repr, LAYOUTS))}")


def check_length(who: str, rank: int, got: int, expected: int, total: int, size: int, layout: str) -> None:
    """Raise `ArgumentError` when `rank` holds another number of tokens than its layout gives it."""
    if got != expected:
        raise ArgumentError(
            f"{who}: rank {rank} holds {got} tokens, "
            f"but layout {layout!r} of {total} over {size} ranks gives it {expected}"
        )


def _axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ArgumentError(f"axis {axis} of an array with {ndim} dimensions")
    return axis % ndim


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]
