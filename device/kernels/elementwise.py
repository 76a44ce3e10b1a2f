"""The plain kernels: copy, fill, add, scale, cast, matmul.

All take their output as `out=`, of the shape that the result has; in place (`out` is an input) is fine except for
matmul. Half types are computed in float32 and rounded once. Large arrays are done tile by tile, so that other streams
of the device get their turn in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from device.dtypes import dtype
from device.errors import ArgumentError
from device.kernels.kernel import Cost, Kernel

Array = npt.NDArray[Any]

_TILE = 1 << 18  # elements: 1 MiB of float32, about half a millisecond
_ROWS = 256  # rows of a matmul result between turns


def _tiled(function: Callable[..., object], *inputs: Array, out: Array) -> Iterator[None] | None:
    """Call `function(*inputs, out)` once, or on one piece after another of large arrays of equal shape."""
    views = (*inputs, out)
    if out.size <= _TILE or not all(v.flags.c_contiguous for v in views) or _shifted(inputs, out):
        function(*views)
        return None
    return _tiles(function, [v.reshape(-1) for v in views])


def _tiles(function: Callable[..., object], flat: list[Array]) -> Iterator[None]:
    for start in range(0, flat[-1].size, _TILE):
        function(*[v[start : start + _TILE] for v in flat])
        yield None


def _shifted(inputs: tuple[Array, ...], out: Array) -> bool:
    """Whether `out` overlaps an input without being the same memory: NumPy buffers that, tiles would not."""
    return any(
        np.may_share_memory(x, out)
        and (x.__array_interface__["data"] != out.__array_interface__["data"] or x.itemsize != out.itemsize)
        for x in inputs
    )


def _same(name: str, *views: Array, types: bool = True) -> None:
    first = views[0]
    for other in views[1:]:
        if other.shape != first.shape or (types and other.dtype != first.dtype):
            raise ArgumentError(
                f"{name}: operands differ: {first.shape} {first.dtype} and {other.shape} {other.dtype}", code=100000
            )


def _elementwise_cost(*operands: Any, out: Array, flops_per_element: int = 1) -> Cost:
    arrays = [x for x in operands if isinstance(x, np.ndarray)]
    nbytes = sum(x.nbytes for x in arrays) + out.nbytes
    width = max([out.itemsize, *[x.itemsize for x in arrays]])
    return Cost(out.size * flops_per_element, nbytes, "vector", width)


def _moving_cost(*operands: Any, out: Array) -> Cost:
    return _elementwise_cost(*operands, out=out, flops_per_element=0)


def _copy(x: Array, *, out: Array) -> Iterator[None] | None:
    _same("copy", x, out)
    return _tiled(lambda x, out: np.copyto(out, x), x, out=out)


def _fill(value: complex, *, out: Array) -> Iterator[None] | None:
    return _tiled(lambda out: out.fill(value), out=out)


def _add(x: Array, y: Array, *, out: Array) -> Iterator[None] | None:
    _same("add", x, y, out)
    inner = dtype(out.dtype).accumulate
    return _tiled(lambda x, y, out: np.add(x, y, out=out, dtype=inner, casting="unsafe"), x, y, out=out)


def _scale(x: Array, factor: complex, *, out: Array) -> Iterator[None] | None:
    _same("scale", x, out)
    inner = dtype(out.dtype).accumulate
    return _tiled(lambda x, out: np.multiply(x, factor, out=out, dtype=inner, casting="unsafe"), x, out=out)


def _cast(x: Array, *, out: Array) -> Iterator[None] | None:
    _same("cast", x, out, types=False)
    return _tiled(lambda x, out: np.copyto(out, x, casting="unsafe"), x, out=out)


def _matmul(x: Array, y: Array, *, out: Array) -> Iterator[None]:
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-2]:
        raise ArgumentError(f"matmul: inner sizes differ: {x.shape} and {y.shape}", code=100000)
    batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    if out.shape != (*batch, x.shape[-2], y.shape[-1]) or x.dtype != y.dtype:
        raise ArgumentError(
            f"matmul: {x.shape} {x.dtype} times {y.shape} {y.dtype} does not go into {out.shape} {out.dtype}",
            code=100000,
        )
    if np.may_share_memory(out, x) or np.may_share_memory(out, y):
        raise ArgumentError("matmul: the output overlaps an input", code=100000)
    return _matmul_rows(x, y, out)


def _matmul_rows(x: Array, y: Array, out: Array) -> Iterator[None]:
    inner = dtype(x.dtype).accumulate
    right = y.astype(inner, copy=False)
    for row in range(0, out.shape[-2], _ROWS):
        rows = slice(row, row + _ROWS)
        np.copyto(out[..., rows, :], x[..., rows, :].astype(inner, copy=False) @ right, casting="unsafe")
        yield None


def _matmul_cost(x: Array, y: Array, *, out: Array) -> Cost:
    return Cost(2 * out.size * x.shape[-1], x.nbytes + y.nbytes + out.nbytes, "cube", x.itemsize)


copy = Kernel("copy", _copy, _moving_cost)
"""``launch(copy, x, out=y)``: y becomes x; same shape and type."""

fill = Kernel("fill", _fill, _moving_cost)
"""``launch(fill, value, out=y)``: every element of y becomes the number `value`."""

add = Kernel("add", _add, _elementwise_cost)
"""``launch(add, x, y, out=z)``: z becomes x + y; same shape and type."""

scale = Kernel("scale", _scale, _elementwise_cost)
"""``launch(scale, x, factor, out=y)``: y becomes x times the number `factor`; same shape and type."""

cast = Kernel("cast", _cast, _elementwise_cost)
"""``launch(cast, x, out=y)``: y becomes x in y's type, as NumPy's astype does; same shape."""

matmul = Kernel("matmul", _matmul, _matmul_cost)
"""``launch(matmul, x, y, out=z)``: x (..., m, k) times y (..., k, n) into z (..., m, n), summed in float32 or wider."""
