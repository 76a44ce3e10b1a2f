"""How is attention computed without ever holding the whole score matrix? Tile by tile, with an online softmax.

For one query row the softmax over all keys is a sum that can be continued at any time from three numbers:

    peak    reference exponent m (base 2), usually the largest score so far
    total   l = sum over the keys seen of 2**(s - m)              s = log2(e) * scale * (q . k)
    acc     o = sum over the keys seen of 2**(s - m) * v

A larger score rescales l and o by 2**(m - m'); the result is o / l, the log-sum-exp ln(2) * (m + log2 l). A row
that has seen no key is (m, l, o) = (-inf, 0, 0) and ends as output 0, lse -inf; nothing here subtracts -inf from -inf.
Keys may come in any number of blocks and from anywhere (`attend_block`, ring attention): the state stays in the
accumulation type, so that the output is rounded once, however many ranks took part.

Half types are converted head by head and accumulated in float32; float64 is accumulated in float64. This is the plain
NumPy version: the oracle and the fallback of compiled ones.

Sources: Dao, FlashAttention-2 (2023), algorithm 1; Milakov and Gimelshein, Online normalizer calculation for softmax
(2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal, NamedTuple, NoReturn, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from device.dtypes import dtype
from device.errors import ArgumentError
from device.kernels.kernel import Cost, Kernel

Array = NDArray[Any]

# Query rows and keys of a tile. The scores (256 x 512 float32 are 512 KiB) and both operands fit a 1 MiB L2 cache;
# measured best of 128...512 rows x 256...1024 keys on a Skylake-SP core.
ROWS, KEYS = 256, 512
# While |s| <= |q| |k| stays below this bound, 2**s itself is far from overflow and underflow, so the reference exponent
# stays 0 and neither the row maximum nor the subtraction is needed: a fifth of the time. Larger scores take both.
FLAT = 32.0
LOG2_E = 1.0 / math.log(2.0)
LN_2 = math.log(2.0)

_TYPES = ("float16", "bfloat16", "float32", "float64")
_NOT_SUPPORTED = 207000  # ACL_ERROR_RT_FEATURE_NOT_SUPPORT


def accumulation_type(x: Any) -> np.dtype[Any]:
    """Return the type in which attention over elements of type `x` keeps its state and its lse.

    Raises: `ArgumentError` for a type that attention does not take.
    """
    entry = dtype(x)
    if entry.name not in _TYPES:
        raise ArgumentError(f"attention takes {', '.join(_TYPES)}, not {entry.name}")
    return entry.accumulate


class SoftmaxState(NamedTuple):
    """Where the online softmax of every query row stands. The arrays are changed in place.

    Shapes: acc (batch, heads, queries, dim), peak and total (batch, heads, queries), all of the accumulation type.
    """

    acc: Array
    peak: Array
    total: Array

    @classmethod
    def fresh(cls, q: Array) -> SoftmaxState:
        """Return the state of queries `q` (batch, heads, queries, dim) that have seen no key."""
        state = cls(*(np.empty(shape, accumulation_type(q.dtype)) for shape in (q.shape, q.shape[:3], q.shape[:3])))
        state.reset()
        return state

    def reset(self) -> None:
        """Forget every key."""
        self.acc[...] = 0.0
        self.peak[...] = -np.inf
        self.total[...] = 0.0

    def finish(self, out: Array, lse: Array | None = None) -> None:
        """Write the attention output into `out`, rounded once to its type, and the natural log-sum-exp into `lse`."""
        empty = self.total == 0.0
        total = np.where(empty, 1.0, self.total).astype(self.acc.dtype, copy=False)
        with np.errstate(invalid="ignore", over="ignore"):
            np.copyto(out, self.acc / total[..., None], casting="same_kind")
            if lse is not None:  # an empty row has peak -inf and total 1 here: its lse is exactly -inf
                np.copyto(lse, LN_2 * (self.peak + np.log2(total)), casting="same_kind")


# ------------------------------------------------------------------------------------------------------ host functions
@overload
def flash_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, causal: bool = ..., scale: float | None = ..., window: None = ...,
    return_lse: Literal[False] = ...,
) -> Array: ...  # fmt: skip


@overload
def flash_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, causal: bool = ..., scale: float | None = ..., window: None = ...,
    return_lse: Literal[True],
) -> tuple[Array, Array]: ...  # fmt: skip


def flash_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: object = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Compute softmax(scale * q k^T) v.

    q: (batch, heads, queries, dim); k, v: (batch, kv heads, keys, dim); all float16, bfloat16, float32 or float64.
    heads is a multiple of kv heads (grouped-query attention): query head h reads kv head h // (heads / kv heads).
    causal: query i sees keys 0 ... i + keys - queries (aligned at the last query and the last key).
    scale: defaults to 1 / sqrt(dim). Rows that see no key get output 0 and lse -inf.

    Returns: out like q, or (out, lse) with lse (batch, heads, queries), natural logarithm, float32 (float64 for
        float64 inputs).
    Raises: `ArgumentError` for shapes or types that do not fit, and for `window`, which is not built yet.

    >>> import numpy as np
    >>> v = np.arange(4, dtype=np.float32).reshape(1, 1, 4, 1)
    >>> flash_attention(np.zeros_like(v), np.zeros_like(v), v, causal=True).ravel()  # equal weights: running means
    array([0. , 0.5, 1. , 1.5], dtype=float32)
    """
    refuse_window("flash_attention", window)
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    check_operands("flash_attention", q, k, v)
    out = np.empty(q.shape, q.dtype)
    lse = np.empty(q.shape[:3], accumulation_type(q.dtype)) if return_lse else None
    for _ in _flash(q, k, v, out, lse, causal=causal, scale=scale):
        pass
    return out if lse is None else (out, lse)


def flash_attention_backward(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: the backward pass is not built yet."""
    raise ArgumentError("flash_attention_backward (the gradient of attention) is not built yet", code=_NOT_SUPPORTED)


def attend_block(
    q: Array,
    k: Array,
    v: Array,
    state: SoftmaxState,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_positions: Array | None = None,
    k_positions: Array | None = None,
) -> None:
    """Let the queries see one more block of keys: continue `state` in place, without rounding.

    Shapes as in `flash_attention`. q_positions (queries,), k_positions (keys,): places in the whole sequence, strictly
    ascending; they are needed when causal, where query position p sees key positions <= p.

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 5, 8))
    >>> state = SoftmaxState.fresh(q)
    >>> for half in (slice(0, 2), slice(2, 5)):
    ...     attend_block(q, k[:, :, half], v[:, :, half], state)
    >>> out = np.empty_like(q)
    >>> state.finish(out)
    >>> bool(np.allclose(out, flash_attention(q, k, v), atol=1e-14))
    True
    """
    check_operands("attend_block", q, k, v)
    for _ in _attend(q, k, v, state, causal, scale, q_positions, k_positions):
        pass


def merge(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Combine two finished results over disjoint keys: out (..., queries, dim), lse (..., queries), natural logarithm.

    Safe for rows that saw no key on either side or on both. For results that travel; `attend_block` loses less.
    """
    peak = np.maximum(lse_a, lse_b)
    base = np.where(np.isneginf(peak), 0.0, peak)
    a, b = np.exp(lse_a - base), np.exp(lse_b - base)
    total = a + b
    safe = np.where(total == 0.0, 1.0, total)
    out = out_a * (a / safe)[..., None] + out_b * (b / safe)[..., None]
    return out, np.where(total == 0.0, -np.inf, base + np.log(safe))


# ------------------------------------------------------------------------------------------------------ argument rules
def refuse_window(who: str, window: object) -> None:
    """Raise for any `window` but None."""
    if window is not None:
        raise ArgumentError(
            f"{who}: window={window!r} (sliding-window attention) is not built yet; pass None", code=_NOT_SUPPORTED
        )


def check_operands(who: str, q: Any, k: Any, v: Any) -> None:
    """Raise `ArgumentError` unless q, k, v are (batch, heads, tokens, dim), fit together and have one type."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 4:
            raise ArgumentError(f"{who}: {name} has shape {tuple(x.shape)}, expected (batch, heads, tokens, dim)")
        if x.dtype != q.dtype:
            raise ArgumentError(f"{who}: {name} is {x.dtype.name}, q is {q.dtype.name}")
    accumulation_type(q.dtype)
    (batch, q_heads, _, dim), (k_batch, kv_heads, _, k_dim) = q.shape, k.shape
    if k.shape != v.shape:
        raise ArgumentError(f"{who}: k has shape {tuple(k.shape)}, v {tuple(v.shape)}; they must be equal")
    if batch != k_batch:
        raise ArgumentError(f"{who}: q has batch {batch}, k and v {k_batch}")
    if dim != k_dim or dim == 0:
        raise ArgumentError(f"{who}: q has head dimension {dim}, k and v {k_dim}; they must be equal and at least 1")
    if kv_heads == 0 or q_heads % kv_heads:
        raise ArgumentError(f"{who}: {q_heads} query heads are no multiple of {kv_heads} kv heads")


def _check_positions(name: str, positions: Array | None, expected: int) -> Array:
    if positions is None:
        raise ArgumentError(f"attend_block: causal needs {name}_positions")
    positions = np.asarray(positions)
    if positions.shape != (expected,) or positions.dtype.kind != "i" or (np.diff(positions) <= 0).any():
        raise ArgumentError(
            f"attend_block: {name}_positions must be {expected} strictly ascending integers, "
            f"got {positions.dtype.name} of shape {positions.shape}"
        )
    return positions


# ------------------------------------------------------------------------------------------------------------ the tiles
class _RowTile(NamedTuple):
    start: int
    stop: int
    all_see: int  # every row of the tile sees keys [0, all_see)
    some_see: int  # no row sees keys [some_see, ...)


def _row_tiles(queries: int, keys: int, q_positions: Array | None, k_positions: Array | None) -> list[_RowTile]:
    """Cut the query rows into tiles and find which keys each tile sees; positions are None when all see all."""
    if q_positions is None or k_positions is None:
        return [_RowTile(i, min(i + ROWS, queries), keys, keys) for i in range(0, queries, ROWS)] if keys else []
    tiles = []
    steps = np.diff(q_positions)
    # A tile never spans a jump (zigzag's two chunks): it would have to be masked over the whole gap.
    jumps = (np.flatnonzero(steps != steps.min(initial=np.iinfo(steps.dtype).max)) + 1).tolist()
    edges = [0, *jumps, queries]
    for first, last in pairwise(edges):
        for start in range(first, last, ROWS):
            stop = min(start + ROWS, last)
            ends = np.searchsorted(k_positions, q_positions[[start, stop - 1]], side="right")
            if ends[1]:
                tiles.append(_RowTile(start, stop, int(ends[0]), int(ends[1])))
    return tiles


class _Scratch:
    """Buffers for one tile: scores, product, a vector of ones."""

    def __init__(self, queries: int, keys: int, dim: int, kind: np.dtype[Any]) -> None:
        rows, columns = min(queries, ROWS), min(keys, KEYS)
        self.scores = np.empty(rows * columns, kind)
        self.product = np.empty((rows, dim), kind)
        self.ones = np.ones(columns, kind)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    state: SoftmaxState | None,
    causal: bool,
    scale: float | None,
    q_positions: Array | None,
    k_positions: Array | None,
    out: Array | None = None,
    lse: Array | None = None,
) -> Iterator[None]:
    """Continue `state` by all keys, yielding between tiles; without one, begin afresh and finish heads into `out`."""
    (batch, q_heads, queries, dim), (_, kv_heads, keys, _) = q.shape, k.shape
    kind = accumulation_type(q.dtype)
    factor = kind.type((dim**-0.5 if scale is None else scale) * LOG2_E)
    if causal:
        q_positions = _check_positions("q", q_positions, queries)
        k_positions = _check_positions("k", k_positions, keys)
        tiles = _row_tiles(queries, keys, q_positions, k_positions)
    else:
        tiles = _row_tiles(queries, keys, None, None)
    scratch = _Scratch(queries, keys, dim, kind)
    own = None if state is not None else SoftmaxState.fresh(q[:1, :1])
    group = q_heads // kv_heads
    for b in range(batch):
        for g in range(kv_heads):
            # One converted copy of the head's keys, transposed: q @ k.T is 5-45 % slower in OpenBLAS on small tiles.
            kt = np.empty((dim, keys), kind)
            kt[...] = k[b, g].T
            values = np.ascontiguousarray(v[b, g], kind)
            k_norm = math.sqrt(np.max(np.sum(kt * kt, axis=0), initial=0.0)) if tiles else 0.0
            for h in range(g * group, (g + 1) * group):
                if state is not None:
                    head = SoftmaxState(state.acc[b, h], state.peak[b, h], state.total[b, h])
                else:
                    assert own is not None
                    head = SoftmaxState(own.acc[0, 0], own.peak[0, 0], own.total[0, 0])
                    head.reset()
                for tile in tiles:
                    yield from _attend_rows(
                        q[b, h], kt, values, head, tile, factor, k_norm, q_positions, k_positions, scratch
                    )
                if out is not None:
                    head.finish(out[b, h], None if lse is None else lse[b, h])


def _attend_rows(
    q: Array,
    kt: Array,
    v: Array,
    head: SoftmaxState,
    tile: _RowTile,
    factor: np.floating[Any],
    k_norm: float,
    q_positions: Array | None,
    k_positions: Array | None,
    scratch: _Scratch,
) -> Iterator[None]:
    """Continue the rows of one tile by the keys that they see: q (queries, dim), kt (dim, keys), v (keys, dim)."""
    rows = slice(tile.start, tile.stop)
    state = SoftmaxState(head.acc[rows], head.peak[rows], head.total[rows])
    with np.errstate(all="ignore"):
        scaled = q[rows].astype(kt.dtype) * factor
        q_norm = math.sqrt(np.max(np.sum(scaled * scaled, axis=1)))
        flat = q_norm * k_norm <= FLAT and not np.any(state.peak[np.isfinite(state.peak)])
    height = tile.stop - tile.start
    for start in range(0, tile.some_see, KEYS):
        stop = min(start + KEYS, tile.some_see)
        scores = scratch.scores[: height * (stop - start)].reshape(height, stop - start)
        hidden = None
        if stop > tile.all_see and q_positions is not None and k_positions is not None:
            seam = max(start, tile.all_see)  # keys before it are seen by all rows
            hidden = scores[:, seam - start :], k_positions[None, seam:stop] > q_positions[rows, None]
        with np.errstate(all="ignore"):  # non-finite inputs give non-finite outputs, as in any attention
            np.matmul(scaled, kt[:, start:stop], out=scores)
            if hidden is not None:
                np.copyto(hidden[0], -np.inf, where=hidden[1])
            if not flat:
                _move_peak(scores, state)
            np.exp2(scores, out=scores)
            state.total[...] += scores @ scratch.ones[: stop - start]
            state.acc[...] += np.matmul(scores, v[start:stop], out=scratch.product[:height])
        yield
    if flat:
        np.copyto(state.peak, 0.0, where=state.total > 0.0)


def _move_peak(scores: Array, state: SoftmaxState) -> None:
    """Raise each row's reference exponent to its largest score, rescale the state, subtract it from the scores."""
    peak = np.maximum(state.peak, scores.max(axis=1))
    base = np.where(np.isneginf(peak), peak.dtype.type(0.0), peak)  # sees nothing so far: 2**(-inf - 0) is 0, not NaN
    if not np.array_equal(peak, state.peak):
        shrink = np.exp2(state.peak - base)
        state.total[...] *= shrink
        state.acc[...] *= shrink[:, None]
        state.peak[...] = peak
    scores -= base[:, None]


def _flash(
    q: Array, k: Array, v: Array, out: Array, lse: Array | None, *, causal: bool = False, scale: float | None = None
) -> Iterator[None]:
    queries, keys = q.shape[2], k.shape[2]
    q_positions = np.arange(keys - queries, keys) if causal else None
    k_positions = np.arange(keys) if causal else None
    return _attend(q, k, v, None, causal, scale, q_positions, k_positions, out, lse)


# ------------------------------------------------------------------------------------------------------ device kernels
def visible_pairs(
    queries: int, keys: int, causal: bool, q_positions: Array | None = None, k_positions: Array | None = None
) -> int:
    """Count the (query, key) pairs that attention computes; without positions, causal is aligned at the ends."""
    if not causal:
        return queries * keys
    if q_positions is None or k_positions is None:
        q_positions, k_positions = np.arange(keys - queries, keys), np.arange(keys)
    return int(np.sum(np.searchsorted(k_positions, q_positions, side="right")))


def _flash_run(
    q: Array, k: Array, v: Array, out: Array, lse: Array, *, causal: bool = False, scale: float | None = None
) -> Iterator[None]:
    check_operands("flash_attention", q, k, v)
    return _flash(q, k, v, out, lse, causal=causal, scale=scale)


def _flash_cost(
    q: Any, k: Any, v: Any, out: Any, lse: Any, *, causal: bool = False, scale: float | None = None
) -> Cost:
    pairs = visible_pairs(q.shape[2], k.shape[2], causal)
    return _cost(q, pairs, q.nbytes + k.nbytes + v.nbytes + out.nbytes + lse.nbytes)


def _attend_run(
    q: Array,
    k: Array,
    v: Array,
    acc: Array,
    peak: Array,
    total: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_positions: Array | None = None,
    k_positions: Array | None = None,
    fresh: bool = False,
) -> Iterator[None]:
    check_operands("attend_block", q, k, v)
    state = SoftmaxState(acc, peak, total)
    if fresh:
        state.reset()
    return _attend(q, k, v, state, causal, scale, q_positions, k_positions)


def _attend_cost(
    q: Any,
    k: Any,
    v: Any,
    acc: Any,
    peak: Any,
    total: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_positions: Array | None = None,
    k_positions: Array | None = None,
    fresh: bool = False,
) -> Cost:
    pairs = visible_pairs(q.shape[2], k.shape[2], causal, q_positions, k_positions)
    state = (1 if fresh else 2) * (acc.nbytes + peak.nbytes + total.nbytes)
    return _cost(q, pairs, q.nbytes + k.nbytes + v.nbytes + state)


def _cost(q: Any, pairs: int, nbytes: int) -> Cost:
    batch, heads, _, dim = q.shape
    return Cost(flops=4 * batch * heads * dim * pairs, bytes=nbytes, unit="cube", element_bytes=q.dtype.itemsize)


def _finish_run(acc: Array, peak: Array, total: Array, out: Array, lse: Array) -> None:
    SoftmaxState(acc, peak, total).finish(out, lse)


def _finish_cost(acc: Any, peak: Any, total: Any, out: Any, lse: Any) -> Cost:
    nbytes = acc.nbytes + peak.nbytes + total.nbytes + out.nbytes + lse.nbytes
    return Cost(flops=acc.size + 3 * peak.size, bytes=nbytes, unit="vector", element_bytes=acc.dtype.itemsize)


flash_attention_kernel = Kernel("flash_attention", _flash_run, _flash_cost)
"""q, k, v, out, lse with `causal=`, `scale=`: shapes and types as in `flash_attention`; writes out and lse."""

attend_kernel = Kernel("attend", _attend_run, _attend_cost)
"""q, k, v, acc, peak, total with the keywords of `attend_block`: continues the state, begins it with `fresh=True`."""

finish_kernel = Kernel("attend_finish", _finish_run, _finish_cost)
"""acc, peak, total, out, lse: writes out and lse from a state, rounding once."""
