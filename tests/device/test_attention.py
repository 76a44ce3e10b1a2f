"""Attention kernel against the formula written out in float64, and proof that these tests can fail."""

import numpy as np
import pytest

import device.kernels.attention as module
from device import Device
from device.errors import ArgumentError
from device.kernels.attention import (
    SoftmaxState,
    attend_block,
    flash_attention,
    flash_attention_backward,
    flash_attention_kernel,
    merge,
)


def formula(q, k, v, causal=False, scale=None, visible=None):
    """Attention as defined, in float64, one dense score matrix; (out, lse)."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) * (1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    queries, keys = scores.shape[-2:]
    if visible is None:
        visible = np.ones((queries, keys), bool)
        if causal:
            visible = np.tril(visible, keys - queries)
    out = np.zeros(q.shape)
    lse = np.full(q.shape[:3], -np.inf)
    for row in range(queries):
        seen = visible[row]
        if seen.any():
            s = scores[:, :, row, seen]
            top = s.max(axis=-1, keepdims=True)
            weights = np.exp(s - top)
            total = weights.sum(axis=-1, keepdims=True)
            out[:, :, row] = np.einsum("bhk,bhkd->bhd", weights / total, v[:, :, seen])
            lse[:, :, row] = (top + np.log(total))[..., 0]
    return out, lse


def operands(batch=1, heads=2, kv_heads=2, queries=33, keys=33, dim=16, dtype=np.float64, spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, heads, queries, dim)) * spread
    k, v = rng.standard_normal((2, batch, kv_heads, keys, dim))
    return tuple(x.astype(dtype) for x in (q, k, v))


def bfloat16():
    return pytest.importorskip("ml_dtypes").bfloat16


def worst(a, b):
    """Largest absolute difference; equal infinities differ by nothing."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    different = a != b
    return np.max(np.abs(a[different] - b[different]), initial=0.0)


@pytest.fixture(params=[(256, 512), (4, 8), (5, 3)], ids=["default tiles", "4x8 tiles", "5x3 tiles"])
def tiles(request, monkeypatch):
    """Small tiles take short sequences through every path: whole, cut, diagonal and skipped tiles."""
    monkeypatch.setattr(module, "ROWS", request.param[0])
    monkeypatch.setattr(module, "KEYS", request.param[1])
    return request.param


# Spread 1 stays below the bound of the unshifted path; 12 takes the one with a running maximum.
@pytest.mark.parametrize("spread", [1.0, 12.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 33), (33, 1), (7, 7), (32, 33), (33, 32), (64, 64)])
def test_float64_equals_the_formula(tiles, queries, keys, causal, spread):
    q, k, v = operands(batch=2, queries=queries, keys=keys, spread=spread)
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    expected_out, expected_lse = formula(q, k, v, causal)
    assert out.dtype == lse.dtype == np.float64
    assert worst(out, expected_out) <= 1e-13
    assert worst(lse, expected_lse) <= 1e-12


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3), (7, 1)])
def test_grouped_query_heads_read_their_kv_head(tiles, heads, kv_heads, causal):
    q, k, v = operands(heads=heads, kv_heads=kv_heads)
    assert worst(flash_attention(q, k, v, causal=causal), formula(q, k, v, causal)[0]) <= 1e-13


@pytest.mark.parametrize("causal", [False, True])
def test_float32_is_accurate_over_many_default_tiles(causal):
    q, k, v = operands(queries=700, keys=1300, dim=64, dtype=np.float32)
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    expected_out, expected_lse = formula(q, k, v, causal)
    assert out.dtype == lse.dtype == np.float32
    assert worst(out, expected_out) <= 2e-6
    assert worst(lse, expected_lse) <= 4e-6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_types_are_rounded_once(name, causal):
    half = bfloat16() if name == "bfloat16" else np.float16
    q, k, v = operands(queries=300, keys=300, dim=32, dtype=half)
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    exact = formula(q, k, v, causal)[0]
    assert out.dtype == half
    assert lse.dtype == np.float32
    rounded = exact.astype(half).astype(np.float64)
    # float32 accumulation moves a result over a rounding boundary now and then, never further than one unit
    assert np.mean(out.astype(np.float64) != rounded) < 0.01
    assert worst(out, exact) <= 1.01 * worst(rounded, exact) + 1e-6


def test_scale_is_applied():
    q, k, v = operands()
    assert worst(flash_attention(q, k, v, scale=0.7), formula(q, k, v, scale=0.7)[0]) <= 1e-13
    assert worst(flash_attention(q, k, v, scale=0), formula(q, k, v, scale=0)[0]) <= 1e-13
    assert worst(flash_attention(q, k, v, scale=-3.0), formula(q, k, v, scale=-3.0)[0]) <= 1e-13


def test_causal_is_aligned_at_the_last_query_and_key():
    q, k, v = operands(queries=2, keys=5)
    out = flash_attention(q, k, v, causal=True)
    assert worst(out[:, :, :1], formula(q[:, :, :1], k[:, :, :4], v[:, :, :4])[0]) <= 1e-14
    assert worst(out[:, :, 1:], formula(q[:, :, 1:], k, v)[0]) <= 1e-14


def test_rows_without_keys_give_zero_and_minus_infinity(tiles):
    q, k, v = operands(queries=20, keys=4)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    assert not out[:, :, :16].any()
    assert np.isneginf(lse[:, :, :16]).all()
    assert np.isfinite(lse[:, :, 16:]).all()
    out, lse = flash_attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert not out.any()
    assert np.isneginf(lse).all()


def test_no_queries_give_an_empty_result():
    q, k, v = operands(queries=0)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]


def test_one_key_returns_its_value():
    q, k, v = operands(keys=1)
    assert worst(flash_attention(q, k, v), np.broadcast_to(v, q.shape)) <= 1e-15


def test_equal_keys_give_running_means():
    q, k, v = operands(keys=33)
    means = np.cumsum(v, axis=2) / np.arange(1, 34)[:, None]
    assert worst(flash_attention(q, k * 0 + 1, v, causal=True), means) <= 1e-14


@pytest.mark.parametrize("offset", [-1e4, -200.0, 200.0, 1e4])
def test_extreme_scores_neither_overflow_nor_vanish(tiles, offset):
    q, k, v = operands(dtype=np.float32)
    q[..., 0], k[..., 0] = 1.0, offset * 4  # adds `offset` to every score, which softmax must not see
    expected_out, expected_lse = formula(q, k, v, causal=True)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    assert worst(out, expected_out) <= 3e-7 * abs(offset)
    assert worst(lse, expected_lse) <= 3e-7 * abs(offset)


def test_a_nan_spoils_its_own_row_only(tiles):
    q, k, v = operands()
    clean = flash_attention(q, k, v)
    q[0, 1, 7, 3] = np.nan
    out = flash_attention(q, k, v)
    assert np.isnan(out[0, 1, 7]).all()
    out[0, 1, 7] = clean[0, 1, 7]
    assert worst(out, clean) <= 1e-13


def test_inputs_may_be_strided_and_are_left_alone():
    q, k, v = (np.asfortranarray(x)[:, :, ::2] for x in operands())
    before = [x.copy() for x in (q, k, v)]
    assert worst(flash_attention(q, k, v), formula(q, k, v)[0]) <= 1e-13
    assert all(np.array_equal(x, y) for x, y in zip((q, k, v), before, strict=True))


def test_repeated_runs_are_identical():
    q, k, v = operands(queries=300, keys=600, dtype=np.float32, spread=4)
    assert np.array_equal(flash_attention(q, k, v, causal=True), flash_attention(q, k, v, causal=True))


# ---------------------------------------------------------------------------------------------------- blocks and merge
@pytest.mark.parametrize("spread", [1.0, 12.0])
def test_blocks_in_any_order_equal_the_whole(tiles, spread):
    q, k, v = operands(heads=4, queries=40, keys=40, spread=spread)
    places = [np.array([0, 1, 2, 3, 30, 31, 39]), np.arange(4, 30, 3), np.arange(5, 30, 3), np.arange(6, 30, 3)]
    places.append(np.setdiff1d(np.arange(40), np.concatenate(places)))
    mine = np.array([0, 3, 7, 8, 9, 25, 26, 38])
    for order in (places, places[::-1]):
        state = SoftmaxState.fresh(q[:, :, mine])
        for block in order:
            attend_block(
                q[:, :, mine], k[:, :, block], v[:, :, block], state, causal=True, q_positions=mine, k_positions=block
            )
        out, lse = np.empty(q[:, :, mine].shape), np.empty((1, 4, len(mine)))
        state.finish(out, lse)
        expected_out, expected_lse = formula(q, k, v, causal=True)
        assert worst(out, expected_out[:, :, mine]) <= 1e-13
        assert worst(lse, expected_lse[:, :, mine]) <= 1e-12


def test_blocks_may_alternate_between_small_and_large_scores():
    q, k, v = operands(queries=8, keys=30)
    k[:, :, 10:20] *= 40
    state = SoftmaxState.fresh(q)
    for first in (0, 10, 20):
        attend_block(q, k[:, :, first : first + 10], v[:, :, first : first + 10], state)
    out = np.empty(q.shape)
    state.finish(out)
    assert worst(out, formula(q, k, v)[0]) <= 1e-13


def test_a_row_that_a_block_hides_keeps_an_empty_state():
    q, k, v = operands(queries=2, keys=2)
    state = SoftmaxState.fresh(q)
    attend_block(q, k, v, state, causal=True, q_positions=np.array([0, 9]), k_positions=np.array([5, 6]))
    assert np.isneginf(state.peak[:, :, 0]).all()
    k[...] -= 1e3 * q[:, :, :1]  # scores of row 0 far below 0: a wrong reference exponent would lose them all
    attend_block(q, k, v, state, causal=True, q_positions=np.array([20, 21]), k_positions=np.array([3, 4]))
    out = np.empty(q.shape)
    state.finish(out)
    assert worst(out[:, :, 0], formula(q, k, v)[0][:, :, 0]) <= 1e-12


def test_positions_are_checked():
    q, k, v = operands(queries=3, keys=3)
    state = SoftmaxState.fresh(q)
    with pytest.raises(ArgumentError, match="causal needs q_positions"):
        attend_block(q, k, v, state, causal=True)
    with pytest.raises(
        ArgumentError, match=r"k_positions must be 3 strictly ascending integers, got int64 of shape \(2,\)"
    ):
        attend_block(q, k, v, state, causal=True, q_positions=np.arange(3), k_positions=np.arange(2))
    with pytest.raises(ArgumentError, match="strictly ascending"):
        attend_block(q, k, v, state, causal=True, q_positions=np.array([2, 1, 0]), k_positions=np.arange(3))


def test_merge_of_finished_halves_equals_the_whole():
    q, k, v = operands(keys=20)
    first, second = (flash_attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 5), slice(5, 20)))
    out, lse = merge(*first, *second)
    expected_out, expected_lse = formula(q, k, v)
    assert worst(out, expected_out) <= 1e-14
    assert worst(lse, expected_lse) <= 1e-13


@pytest.mark.parametrize("type_", [np.float32, np.float64])
def test_merge_is_safe_where_one_or_both_sides_saw_nothing(type_):
    empty, full = np.zeros((1, 4), type_), np.full((1, 4), 3, type_)
    none, some = np.array([-np.inf], type_), np.array([0.5], type_)
    with np.errstate(all="raise"):
        for a, b in (((empty, none), (full, some)), ((full, some), (empty, none))):
            out, lse = merge(*a, *b)
            assert np.array_equal(out, full)
            assert np.array_equal(lse, some)
        out, lse = merge(empty, none, empty, none)
    assert not out.any()
    assert np.isneginf(lse).all()
    out, lse = merge(full, np.array([1e4], type_), empty, np.array([-1e4], type_))
    assert np.array_equal(out, full)
    assert lse == 1e4


# ----------------------------------------------------------------------------------------------------- refused by name
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8)), r"q has shape \(1, 2, 4\), expected \(batch, heads, tokens, dim\)"),
        (((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 5, 8)), r"k has shape \(1, 2, 4, 8\), v \(1, 2, 5, 8\)"),
        (((1, 2, 4, 8), (1, 2, 4, 9), (1, 2, 4, 9)), "q has head dimension 8, k and v 9"),
        (((1, 2, 4, 0), (1, 2, 4, 0), (1, 2, 4, 0)), "at least 1"),
        (((2, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)), "q has batch 2, k and v 1"),
        (((1, 4, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8)), "4 query heads are no multiple of 3 kv heads"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, message):
    with pytest.raises(ArgumentError, match=message):
        flash_attention(*(np.zeros(shape, np.float32) for shape in shapes))


def test_types_that_do_not_fit_are_named():
    q, k, v = operands(dtype=np.float32)
    with pytest.raises(ArgumentError, match="k is float64, q is float32"):
        flash_attention(q, k.astype(np.float64), v)
    with pytest.raises(ArgumentError, match="attention takes float16, bfloat16, float32, float64, not int32"):
        flash_attention(*(x.astype(np.int32) for x in (q, k, v)))


def test_features_to_come_are_refused_by_name():
    q, k, v = operands()
    with pytest.raises(ArgumentError, match=r"window=\(4, 0\) \(sliding-window attention\) is not built yet"):
        flash_attention(q, k, v, window=(4, 0))
    with pytest.raises(ArgumentError, match="flash_attention_backward"):
        flash_attention_backward(q, q, k, v, q, None)
    with pytest.raises(TypeError, match="dropout_p"):
        flash_attention(q, k, v, dropout_p=0.1)


# ---------------------------------------------------------------------------------------------------------- the kernel
def test_the_kernel_yields_between_tiles_and_fills_its_outputs(monkeypatch):
    monkeypatch.setattr(module, "ROWS", 8)
    monkeypatch.setattr(module, "KEYS", 8)
    q, k, v = operands(queries=16, keys=16, dtype=np.float32)
    out, lse = np.full(q.shape, np.nan, np.float32), np.full(q.shape[:3], np.nan, np.float32)
    turns = list(flash_attention_kernel.run(q, k, v, out, lse, causal=True))
    assert turns == [None] * (2 * 3)  # two heads; of 2 x 2 tiles the one above the diagonal is skipped
    expected_out, expected_lse = formula(q, k, v, causal=True)
    assert worst(out, expected_out) <= 1e-6
    assert worst(lse, expected_lse) <= 2e-6


def test_the_kernel_runs_on_a_device_beside_other_streams():
    q, k, v = operands(queries=40, keys=40, dtype=np.float32)
    with Device(check="strict") as npu:
        mine = [npu.array(x) for x in (q, k, v)]
        out, lse = npu.empty(q.shape, q.dtype), npu.empty(q.shape[:3], q.dtype)
        npu.launch(flash_attention_kernel, *mine, out, lse, stream=npu.stream(), causal=True)
        expected_out, expected_lse = formula(q, k, v, causal=True)
        assert worst(out.numpy(), expected_out) <= 1e-6
        assert worst(lse.numpy(), expected_lse) <= 2e-6


def test_a_launch_with_operands_that_do_not_fit_fails_by_name():
    q, k, v = operands(heads=4, kv_heads=3, dtype=np.float32)

    def launch():
        with Device() as npu:
            mine = [npu.array(x) for x in (q, k, v)]
            npu.launch(flash_attention_kernel, *mine, npu.empty(q.shape), npu.empty(q.shape[:3]))

    with pytest.raises(ArgumentError, match="4 query heads are no multiple of 3 kv heads"):
        launch()


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "pairs"), [(8, 8, False, 64), (8, 8, True, 36), (2, 5, True, 9), (5, 2, True, 3)]
)
def test_the_cost_counts_the_pairs_that_are_computed(queries, keys, causal, pairs):
    q, k, v = operands(batch=3, heads=4, queries=queries, keys=keys, dtype=np.float32)
    out, lse = np.empty(q.shape, np.float32), np.empty(q.shape[:3], np.float32)
    cost = flash_attention_kernel.cost(q, k, v, out, lse, causal=causal)
    assert cost.flops == 4 * 3 * 4 * 16 * pairs
    assert cost.bytes == sum(x.nbytes for x in (q, k, v, out, lse))


# ----------------------------------------------------------------------------------- these tests can tell right from wr
def _strict_diagonal(queries, keys, q_positions, k_positions, _original=module._row_tiles):
    return _original(queries, keys, None if q_positions is None else q_positions - 1, k_positions)


def _no_skipping(queries, keys, q_positions, k_positions, _original=module._row_tiles):
    return _original(queries, keys, None, None)


def _forget_to_rescale(scores, state):
    np.maximum(state.peak, scores.max(axis=1), out=state.peak)
    scores -= state.peak[:, None]


def _unguarded(scores, state):
    peak = np.maximum(state.peak, scores.max(axis=1))
    shrink = np.exp2(state.peak - peak)
    state.total[...] *= shrink
    state.acc[...] *= shrink[:, None]
    state.peak[...] = peak
    scores -= peak[:, None]


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("_row_tiles", _strict_diagonal),
        ("_row_tiles", _no_skipping),
        ("_move_peak", _forget_to_rescale),
        ("_move_peak", _unguarded),
        ("FLAT", np.inf),
        ("LN_2", 1.0),
    ],
)
def test_a_damaged_kernel_is_noticed(name, mutant, monkeypatch):
    monkeypatch.setattr(module, "ROWS", 4)
    monkeypatch.setattr(module, "KEYS", 8)

    def error():
        q, k, v = operands(queries=20, keys=14, spread=2000.0)
        out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        expected_out, expected_lse = formula(q, k, v, causal=True)
        return max(worst(out, expected_out), worst(lse, expected_lse) / 1e4)

    assert error() <= 1e-11
    monkeypatch.setattr(module, name, mutant)
    with np.errstate(all="ignore"):
        assert not error() <= 1e-3
