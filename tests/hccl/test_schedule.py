"""Schedules do what their collective says: moved on real arrays by the simplest executor there can be."""

from __future__ import annotations

import numpy as np
import pytest

from hccl.algorithms import build, built, variants
from hccl.collectives import COLLECTIVES, after, before, oracle
from hccl.errors import ArgumentError, UnsupportedError
from hccl.schedule import REDUCE, Schedule, Step, repeat

CHUNK = 3  # elements


def run_plainly(schedule: Schedule, chunks: np.ndarray, in_place: bool) -> np.ndarray:
    """Execute on chunks (ranks, n_in, CHUNK), one row after the other; gives (ranks, n_out, CHUNK)."""
    s = schedule
    memory = np.full((s.ranks, s.slots, CHUNK), np.nan, dtype=chunks.dtype)
    memory[:, : s.n_in] = chunks
    place = np.arange(s.slots)
    if in_place:
        place[s.n_in : s.n_in + s.n_out] -= s.n_in
    for step in s.steps():
        was = memory.copy()
        for i in range(len(step)):
            for k in range(step.count[i]):
                shift = k * step.stride[i]
                new = was[step.src[i], place[step.src_slot[i] + shift]]
                there = memory[step.dst[i], place[step.dst_slot[i] + shift]]
                there[:] = there + new if step.op[i] == REDUCE else new
    return memory[:, place[s.n_in : s.n_in + s.n_out]]


def whole_inputs(op: str, ranks: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Input of every rank as the caller sees it, whole numbers so that float sums are exact."""
    length = CHUNK if COLLECTIVES[op].before == "part" else CHUNK * ranks
    return [rng.integers(-50, 50, length).astype(np.float32) for _ in range(ranks)]


@pytest.mark.parametrize(("op", "algo"), built())
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_schedules_moved_on_arrays_give_what_numpy_gives(op, algo, ranks):
    rng = np.random.default_rng(ranks)
    for options in variants(op, algo, ranks):
        schedule = build(op, algo, ranks, **options)
        inputs = whole_inputs(op, ranks, rng)
        # One-chunk schedules move the whole buffer in a slot: give them chunks of CHUNK elements all the same.
        inputs = [x[: schedule.n_in * CHUNK] for x in inputs]
        expected = oracle(op, inputs, root=schedule.root)
        chunks = np.stack(inputs).reshape(ranks, schedule.n_in, CHUNK)
        for in_place in (False, True) if schedule.in_place_ok else (False,):
            got = run_plainly(schedule, chunks, in_place)
            for rank in range(ranks):
                if expected[rank] is not None:
                    np.testing.assert_array_equal(got[rank].ravel(), expected[rank], err_msg=f"{options} rank {rank}")


@pytest.mark.parametrize(
    ("algo", "options", "first"), [("ring", {}, "c+1"), ("mesh", {}, "c"), ("mesh", {"one_shot": True}, "0")]
)
def test_sums_are_made_in_the_order_the_schedule_promises(algo, options, first):
    ranks = 6
    schedule = build("all_reduce", algo, ranks, **options)
    chunks = np.random.default_rng(1).standard_normal((ranks, schedule.n_in, CHUNK)).astype(np.float32)
    got = run_plainly(schedule, chunks, in_place=False)
    for c in range(schedule.chunks):
        start = {"c+1": c + 1, "c": c, "0": 0}[first]
        expected = chunks[start % ranks, c].copy()
        for k in range(1, ranks):
            expected += chunks[(start + k) % ranks, c]
        for rank in range(ranks):
            assert got[rank, c].tobytes() == expected.tobytes()


def test_ring_moves_the_slices_of_hccl_s_table():
    # Reduce-scatter step i: r -> r+1 slice r-1-i; all-gather step i: r -> r+1 slice r-i.
    steps = list(build("all_reduce", "ring", 4).steps())
    assert len(steps) == 1 + 3 + 3
    for i, step in enumerate(steps[1:4]):
        assert step.dst.tolist() == [1, 2, 3, 0]
        assert (step.src_slot - 4).tolist() == [(r - 1 - i) % 4 for r in range(4)]
        assert set(step.op.tolist()) == {REDUCE}
    for i, step in enumerate(steps[4:]):
        assert (step.src_slot - 4).tolist() == [(r - i) % 4 for r in range(4)]
        assert step.by == "dst"


def test_mesh_owners_start_with_their_right_neighbour():
    _, reduce, gather = build("all_reduce", "mesh", 4).steps()
    assert reduce.src[reduce.dst == 2].tolist() == [3, 0, 1]
    assert gather.dst[gather.src == 2].tolist() == [3, 0, 1]
    assert (reduce.by, gather.by) == ("dst", "src")


@pytest.mark.parametrize(("op", "algo"), [("all_reduce", "ring"), ("all_reduce", "mesh")])
def test_all_reduce_sends_no_more_than_the_lower_bound(op, algo):
    for ranks in (2, 3, 8):
        sent = np.zeros(ranks)
        for step in build(op, algo, ranks).steps():
            remote = step.src != step.dst
            sent += np.bincount(step.src[remote], step.count[remote], ranks)
        assert sent.tolist() == [2 * (ranks - 1)] * ranks  # chunks of 1/ranks


def test_steps_can_be_gone_through_again_and_are_made_when_asked_for():
    schedule = build("all_reduce", "ring", 5)
    assert len(list(schedule.steps())) == len(list(schedule.steps())) == 9
    huge = build("all_reduce", "ring", 100_000)  # 200 000 steps of 100 000 rows: only two are made
    steps = huge.steps()
    next(steps)
    assert len(next(steps)) == 100_000


def test_a_schedule_tells_its_buffers_apart():
    schedule = build("reduce_scatter", "ring", 5)
    assert (schedule.n_in, schedule.n_out, schedule.n_scratch, schedule.slots) == (5, 1, 2, 8)
    assert [schedule.slot_name(k) for k in (0, 4, 5, 6, 7)] == ["in[0]", "in[4]", "out[0]", "scratch[0]", "scratch[1]"]
    assert schedule.slot_name(8) == "slot 8 of 8"  # which there is not; verify's messages come through here


def test_step_columns_are_broadcast_and_read_only():
    step = Step.of([0, 1, 2], 3, 0, [4, 5, 6])
    assert len(step) == 3
    assert step.dst.tolist() == [3, 3, 3]
    assert step.count.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="read-only"):
        step.dst[0] = 1
    assert len(Step.of([], [], 0, 0)) == 0
    assert len(Step.of(0, 1, 0, 0)) == 1


def test_reductions_are_pulled_and_copies_pushed_unless_said_otherwise():
    assert Step.of(0, 1, 0, 0, op=REDUCE).by == "dst"
    assert Step.of(0, 1, 0, 0).by == "src"
    assert Step.of(0, 1, 0, 0, by="dst").by == "dst"


def test_select_keeps_the_given_order():
    step = Step.of([0, 1, 2], [1, 2, 0], 0, 1).select([2, 0])
    assert step.src.tolist() == [2, 0]
    assert step.select(step.dst == 1).src.tolist() == [0]


def test_repeat_moves_slots_within_its_window_only():
    first = Step.of([0, 1], [1, 0], [2, 3], [3, 4])
    steps = list(repeat(first, 3, 1, (2, 3)))
    assert [s.src_slot.tolist() for s in steps] == [[2, 3], [3, 4], [4, 2]]
    assert [s.dst_slot.tolist() for s in steps] == [[3, 4], [4, 2], [2, 3]]
    assert all(s.src is first.src for s in steps)
    assert list(repeat(first, 0, 1, (2, 3))) == []


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("all_sum", "ring", 4), {}, ArgumentError, "no collective 'all_sum'"),
        (("all_reduce", "rinq", 4), {}, ArgumentError, "no algorithm 'rinq': there are ring, mesh"),
        (("all_reduce", "nhr", 4), {}, UnsupportedError, "algorithm 'nhr' is not built yet"),
        (("all_to_all", "ring", 4), {}, UnsupportedError, "no ring algorithm for all_to_all: all_to_all has mesh"),
        (("all_reduce", "ring", 0), {}, ArgumentError, "at least 1 rank, got 0"),
        (("all_reduce", "ring", 2.5), {}, ArgumentError, "whole numbers, got 2.5"),
        (("reduce", "ring", 4), {"root": 4}, ArgumentError, "root 4 is not one of 4 ranks"),
        (("all_reduce", "mesh", 4), {"root": 1}, ArgumentError, "no option 'root'; it has one_shot"),
        (("all_reduce", "ring", 4), {"one_shot": True}, ArgumentError, "no option 'one_shot'; it has none"),
        (("all_gather", "mesh", 4), {"one_shot": True}, ArgumentError, "no option 'one_shot'"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(arguments, options, error, message):
    with pytest.raises(error, match=message):
        build(*arguments, **options)


def test_built_lists_what_there_is():
    assert ("all_to_all", "ring") not in built()
    assert len(built()) == 15
    assert built("all_to_all") == [("all_to_all", "mesh")]
    assert len(built(algo="ring")) == 7
    with pytest.raises(UnsupportedError, match="not built yet"):
        built(algo="nhr")


def test_pre_and_postcondition_of_the_exchange():
    assert before("all_to_all", 2, 2).tolist() == [[0, 1], [2, 3]]
    assert after("all_to_all", 2, 2).tolist() == [[0, 2], [1, 3]]
    assert after("gather", 2, 2, root=1).tolist() == [[-1, -1], [0, 1]]
    with pytest.raises(ArgumentError, match="3 chunks cannot be split over 2 ranks"):
        before("all_gather", 2, 3)


def test_oracle_gives_the_results_written_down_by_hand():
    a, b = np.array([1, 2]), np.array([10, 20])
    both = [a, b]
    as_lists = {op: [None if x is None else x.tolist() for x in oracle(op, both, root=1)] for op in COLLECTIVES}
    assert as_lists == {
        "all_reduce": [[11, 22], [11, 22]],
        "all_gather": [[1, 2, 10, 20], [1, 2, 10, 20]],
        "reduce_scatter": [[11], [22]],
        "broadcast": [[10, 20], [10, 20]],
        "reduce": [None, [11, 22]],
        "scatter": [[10], [20]],
        "gather": [None, [1, 2, 10, 20]],
        "all_to_all": [[1, 10], [2, 20]],
    }
    assert [oracle("all_reduce", both, op)[0].tolist() for op in ("prod", "max", "min")] == [[10, 40], [10, 20], [1, 2]]


def test_oracle_rounds_once_and_wraps_integers():
    halves = [np.array([2048], np.float16), np.array([1], np.float16), np.array([1], np.float16)]
    assert oracle("all_reduce", halves)[0] == np.float16(2050)  # added one by one in float16 it stays 2048
    assert oracle("all_reduce", [np.array([100], np.int8)] * 2)[0].tolist() == [-56]
    with pytest.raises(ArgumentError, match="first axis of 3 is not divisible by 2 ranks"):
        oracle("reduce_scatter", [np.ones(3)] * 2)
    with pytest.raises(ArgumentError, match="no reduce operation 'avg'"):
        oracle("all_reduce", [np.ones(3)] * 2, "avg")


def test_busbw_factors_are_those_of_nccl_tests():
    factors = {op: c.bus_factor(8) for op, c in COLLECTIVES.items()}
    assert factors.pop("all_reduce") == 14 / 8
    assert (factors.pop("broadcast"), factors.pop("reduce")) == (1, 1)
    assert set(factors.values()) == {7 / 8}
