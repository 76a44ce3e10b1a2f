"""Layouts: every token has one owner, in every layout, for every length."""

import numpy as np
import pytest

from hccl.errors import ArgumentError
from parallel.sharding import LAYOUTS, lengths, positions, shard, unshard

SIZES = [1, 2, 3, 4, 5, 8]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_every_token_has_exactly_one_owner(size, layout):
    for length in (0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 31, 97):
        parts = [positions(length, rank, size, layout) for rank in range(size)]
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(length))
        for part in parts:
            assert part.dtype == np.int64
            assert (np.diff(part) > 0).all()
        assert lengths(length, size, layout) == [len(part) for part in parts]
        unit = 2 if layout == "zigzag" else 1
        assert max(map(len, parts)) - min(map(len, parts)) <= unit


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        ("zigzag", [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        ("striped", [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
    ],
)
def test_layouts_of_16_tokens_over_4_ranks(layout, expected):
    assert [positions(16, rank, 4, layout).tolist() for rank in range(4)] == expected


def test_zigzag_bounds_are_the_floors_for_odd_lengths():
    # chunk bounds floor(7 i / 6): 0 1 2 3 4 5 7
    assert [positions(7, rank, 3, "zigzag").tolist() for rank in range(3)] == [[0, 5, 6], [1, 4], [2, 3]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_unshard_is_the_inverse_of_shard(layout, axis):
    x = np.arange(7 * 9 * 11).reshape(7, 9, 11)
    for source in (x, x.transpose(2, 0, 1), x[:, ::-2]):
        for size in SIZES:
            parts = [shard(source, rank, size, axis, layout) for rank in range(size)]
            assert all(part.flags.c_contiguous and not np.shares_memory(part, source) for part in parts)
            assert np.array_equal(unshard(parts, axis, layout), source)


def test_every_element_type_survives():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.arange(10).astype(ml_dtypes.bfloat16)
    whole = unshard([shard(x, rank, 3, 0, "zigzag") for rank in range(3)], 0, "zigzag")
    assert whole.dtype == x.dtype
    assert np.array_equal(whole, x)


def causal_work(length, size, layout):
    """(query, key) pairs of each rank at each hop of a ring in which all ranks wait for the slowest."""
    places = [positions(length, rank, size, layout) for rank in range(size)]
    return [
        [int(np.sum(places[(rank - hop) % size][None] <= places[rank][:, None])) for rank in range(size)]
        for hop in range(size)
    ]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_causal_balance_is_what_the_algebra_says(size):
    chunk = 12
    length = size * chunk
    ideal = chunk * (size * chunk + 1) / 2
    makespan = {layout: sum(max(hop) for hop in causal_work(length, size, layout)) for layout in LAYOUTS}
    assert makespan["contiguous"] == (size - 1) * chunk**2 + chunk * (chunk + 1) // 2
    assert makespan["zigzag"] == ideal
    assert makespan["striped"] == size * chunk * (chunk + 1) // 2


def test_wrong_arguments_are_named():
    with pytest.raises(ArgumentError, match="layout 'blocked' is unknown; there are 'contiguous', 'zigzag', 'striped'"):
        shard(np.arange(4), 0, 2, 0, "blocked")
    with pytest.raises(ArgumentError, match="rank 2 of 2"):
        positions(4, 2, 2, "zigzag")
    with pytest.raises(ArgumentError, match="rank 0 of 0"):
        positions(4, 0, 0, "zigzag")
    with pytest.raises(ArgumentError, match="-1 tokens"):
        positions(-1, 0, 1, "striped")
    with pytest.raises(ArgumentError, match="axis 1 of an array with 1 dimensions"):
        shard(np.arange(4), 0, 2, 1, "zigzag")


def test_parts_that_no_layout_gives_are_named():
    with pytest.raises(ArgumentError, match="no parts"):
        unshard([], 0, "zigzag")
    with pytest.raises(ArgumentError, match="rank 0 holds 1 tokens, but layout 'striped' of 3 over 2 ranks gives it 2"):
        unshard([[0], [1, 2]], 0, "striped")
    with pytest.raises(ArgumentError, match=r"part of rank 1 has shape \(1, 3\), of rank 0 \(1, 2\)"):
        unshard([np.zeros((1, 2)), np.zeros((1, 3))], 0, "striped")
    with pytest.raises(ArgumentError, match="part of rank 1 is float32, of rank 0 float64"):
        unshard([np.zeros(1), np.zeros(1, np.float32)], 0, "striped")


def test_a_damaged_layout_is_noticed(monkeypatch):
    """The oracle of this file must see a zigzag that floor-divides and drops the remainder."""

    def floor_dividing(length, rank, size):
        chunk = length // (2 * size)
        first, last = rank * chunk, (2 * size - 1 - rank) * chunk
        return np.concatenate([np.arange(first, first + chunk), np.arange(last, last + chunk)])

    monkeypatch.setitem(LAYOUTS, "zigzag", floor_dividing)
    test_layouts_of_16_tokens_over_4_ranks("zigzag", [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]])
    with pytest.raises(AssertionError):
        test_every_token_has_exactly_one_owner(4, "zigzag")
