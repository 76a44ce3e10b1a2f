"""How is one tile reduced? Operations of one tile as (function, arguments) pairs, for every type and operation.

Types that NumPy adds natively are reduced in place. Half types are summed in float32 and rounded once per group, as the
vector cores do; the order of the sum is the order of the sources, so results are bitwise repeatable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hccl.types import ReduceOp

Operation = tuple[Callable[..., Any], tuple[Any, ...]]


def _maximum(first: NDArray[Any], second: NDArray[Any], target: NDArray[Any]) -> None:
    np.maximum(first, second, out=target)  # NumPy deprecates the third positional argument of these two


def _minimum(first: NDArray[Any], second: NDArray[Any], target: NDArray[Any]) -> None:
    np.minimum(first, second, out=target)


COMBINE: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: _maximum,
    ReduceOp.MIN: _minimum,
}


def reduce_operations(
    op: ReduceOp, target: NDArray[Any], sources: Sequence[NDArray[Any]], wide: np.dtype[Any]
) -> list[Operation]:
    """Return the operations for target = sources[0] op sources[1] op …, accumulated in type `wide`.

    `target` may be `sources[0]`; arrays are 1-D and of one length and type.
    """
    combine = COMBINE[op]
    if wide != target.dtype:
        return [(_reduce_wide, (combine, target, tuple(sources), wide))]
    first, second, *rest = sources
    return [(combine, (first, second, target)), *((combine, (target, source, target)) for source in rest)]


def _reduce_wide(
    combine: Callable[..., Any], target: NDArray[Any], sources: tuple[NDArray[Any], ...], wide: np.dtype[Any]
) -> None:
    total = sources[0].astype(wide)
    for source in sources[1:]:
        combine(total, source.astype(wide), total)
    target[...] = total  # rounds once
