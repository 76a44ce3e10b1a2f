"""verify proves every schedule there is, and rejects every damaged one, saying which rule is broken and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from hccl import algorithms
from hccl.algorithms import build, built, variants
from hccl.errors import ScheduleError
from hccl.schedule import COPY, REDUCE, Schedule, Step
from hccl.verify import cases, main, verify


@pytest.mark.parametrize(("op", "algo"), built())
def test_every_schedule_is_proven(op, algo):
    for schedule in cases(op, algo):  # 1 to 33 and 64 ranks, in place and out of place
        verify(schedule)


def test_beyond_256_ranks_fingerprints_take_the_place_of_sets():
    verify(build("all_reduce", "ring", 257))
    verify(build("reduce_scatter", "mesh", 257))
    steps = list(build("all_reduce", "ring", 257).steps())
    steps[3] = steps[3].select(np.arange(257) != 100)
    with pytest.raises(ScheduleError, match="lacks contributions, or has some twice"):
        verify(with_steps(build("all_reduce", "ring", 257), steps))


# ---- damage


def with_steps(schedule: Schedule, steps: list[Step]) -> Schedule:
    return replace(schedule, source=lambda: steps)


def changed(step: Step, row: int, **columns: int) -> Step:
    new = {}
    for name, value in columns.items():
        column = getattr(step, name).copy()
        column[row] = value
        new[name] = column
    return replace(step, **new)


def single_damages(step: Step) -> Iterator[tuple[str, Step]]:
    """Every way to damage one transfer of a step."""
    rows = np.arange(len(step))
    for row in range(len(step)):
        yield f"row {row} dropped", step.select(rows != row)
        yield f"row {row} twice", step.select(np.append(rows, row))
        for name in ("src_slot", "dst_slot"):
            for shift in (-1, 1):
                yield f"row {row} {name} {shift:+}", changed(step, row, **{name: getattr(step, name)[row] + shift})
        yield f"row {row} other op", changed(step, row, op=COPY + REDUCE - step.op[row])
        for other in range(row):
            same = step.dst[row] == step.dst[other] and step.dst_slot[row] == step.dst_slot[other]
            if same and REDUCE in (step.op[row], step.op[other]):
                order = rows.copy()
                order[[row, other]] = other, row
                yield f"rows {other}, {row} swapped", step.select(order)


@pytest.mark.parametrize(("op", "algo"), built())
def test_every_damage_to_a_single_transfer_is_rejected(op, algo):
    for options in variants(op, algo, 8):
        if options.get("root", 3) != 3:
            continue
        schedule = build(op, algo, 8, **options)
        steps = list(schedule.steps())
        accepted = []
        for number, step in enumerate(steps):
            for what, damaged in single_damages(step):
                try:
                    verify(with_steps(schedule, [*steps[:number], damaged, *steps[number + 1 :]]))
                except ScheduleError:
                    continue
                accepted.append(f"{op} {algo} {options} step {number} {what}")
        assert accepted == []


@pytest.mark.parametrize(("op", "algo"), built())
def test_swapped_steps_are_rejected(op, algo):
    for options in variants(op, algo, 8):
        schedule = build(op, algo, 8, **options)
        steps = list(schedule.steps())
        for i in range(len(steps) - 1):
            if i == 0 and algo == "ring" and op in ("scatter", "gather"):
                continue  # the root's copy of its own chunk may be made at any time
            swapped = [*steps[:i], steps[i + 1], steps[i], *steps[i + 2 :]]
            with pytest.raises(ScheduleError):
                verify(with_steps(schedule, swapped))


# ---- every rule has its own words


def small(op: str, steps: list[Step], **changes: object) -> Schedule:
    """A schedule of 3 ranks with one chunk in, one out and one scratch (slots 0, 1, 2), of these steps."""
    base = Schedule(op, "handmade", 3, 1, 1, 1, 1, lambda: steps)
    return replace(base, **changes)  # type: ignore[arg-type]


COPIES = Step.of([0, 1, 2], [0, 1, 2], 0, 1)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (small("all_reduce", [Step.of(0, 3, 0, 1)]), r"step 0, row 0 .*: dst rank is 0 to 2, got 3"),
        (small("all_reduce", [Step.of([0, -1], 0, 0, 1)]), r"row 1 .*: src rank is 0 to 2, got -1"),
        (small("all_reduce", [Step.of(0, 1, 0, 5)]), "dst slot is 0 to 2, got 5"),
        (small("all_reduce", [Step.of(0, 1, 0, 1, op=2)]), "op is 0 to 1, got 2"),
        (small("all_reduce", [Step.of(0, 1, 0, 1, count=0)]), "count is 1 or more, got 0"),
        (small("all_reduce", [Step.of(0, 1, 0, 1, stride=0)]), "stride is 1 or more, got 0"),
        (small("all_reduce", [Step.of(0, 1, 0, 1, lane=-1)]), "lane is 0 or more, got -1"),
        (small("all_reduce", [Step.of(0, 1, 0, 1, count=2)]), r"\(2 chunks, stride 1\)\): src chunks run past the end"),
        (small("all_reduce", [Step.of(0, 1, 0, 0)]), r"rank 1 in\[0\]\): writes to the input"),
        (small("reduce", [Step.of(0, 1, 0, 1)]), "writes the output of rank 1, which has no result and no output"),
        (small("reduce", [Step.of(1, 0, 1, 1)]), "reads the output of rank 1, which has no result"),
        (small("all_reduce", [Step.of(0, 1, 2, 1)]), r"reads nothing: rank 0 scratch\[0\] has not been written"),
        (small("broadcast", [Step.of(1, 2, 0, 1)]), r"reads nothing: rank 1 in\[0\] has not been written"),
        (small("all_reduce", [Step.of(0, 1, 0, 1, op=REDUCE)]), r"reduces into nothing: rank 1 out\[0\]"),
        (
            small("all_reduce", [COPIES, Step.of([0, 1], [1, 2], [0, 1], 1, op=REDUCE)]),
            r"step 1, row 1 .*reads rank 1 out\[0\], which row 0 writes in the same step",
        ),
        (
            small("all_reduce", [COPIES, Step.of(1, 1, 1, 1, op=REDUCE)]),
            r"reads and writes the same chunk, rank 1 out\[0\]",
        ),
        (
            small("broadcast", [Step.of(0, [1, 1], 0, 1)]),
            r"row 1 .*two copies write rank 1 out\[0\] in one step, row 0",
        ),
        (
            small("all_reduce", [COPIES, Step.of([0, 2], 1, 0, 1, op=[REDUCE, COPY])]),
            r"copies over rank 1 out\[0\], into which row 0 reduces in the same step",
        ),
        (
            small("all_reduce", [Step.of([0, 2], 1, 0, 1, op=[COPY, REDUCE], by="src")]),
            "reduces into a chunk to which row 0 is pushed by its sender: no order",
        ),
        (
            small("all_reduce", [COPIES, Step.of([0, 2], 1, 0, 1, op=REDUCE, lane=[0, 1])]),
            "reduces into one chunk from two lanes, as does row 0: no order",
        ),
        (
            small("all_reduce", [COPIES, Step.of([0, 0], 1, 0, 1, op=REDUCE)]),
            r"step 1, row 1 .*adds the contribution of rank 0 to chunk 0 a second time",
        ),
        (small("all_reduce", [COPIES]), r"rank 0 out\[0\]: chunk 0 lacks the contribution of rank 1, 2"),
        (small("broadcast", [Step.of(0, [0, 1], 0, 1)]), r"rank 2 out\[0\] holds nothing instead of chunk 0"),
        (small("all_gather", [COPIES], chunks=3, n_out=3), r"rank 0 out\[1\] holds nothing instead of chunk 1"),
        (
            small("scatter", [Step.of(0, [0, 1, 2], [0, 2, 2], 3)], chunks=3, n_in=3),
            r"rank 1 out\[0\] holds chunk 2 instead of chunk 1",
        ),
        (
            small("reduce_scatter", [Step.of(0, 0, 0, 3), Step.of(1, 0, 1, 3, op=REDUCE)], chunks=3, n_in=3),
            r"adds chunk 1 to chunk 0 in rank 0 out\[0\]",
        ),
        (small("all_gather", []), "1 chunks cannot be split over 3 ranks evenly"),
        (small("all_gather", [], chunks=3), "has 1 output slots where all_gather of 3 chunks has 3"),
        (small("all_reduce", [], n_in=2), "has 2 input slots where all_reduce of 1 chunks has 1"),
        (small("reduce", [], root=3), "root 3 is not one of 3 ranks"),
    ],
)
def test_each_broken_rule_is_named_with_step_rank_and_chunk(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        verify(schedule)


def test_the_message_says_which_schedule_and_how_the_buffers_lie():
    with pytest.raises(ScheduleError, match=r"^broadcast by handmade, 3 ranks, root 0, out of place: at the end"):
        verify(small("broadcast", [Step.of(0, 0, 0, 1)]))


def test_ranks_must_agree_to_the_bit_even_if_no_order_is_promised():
    # Rank 0 adds 0, 1, 2; ranks 1 and 2 begin with their own.
    rows = Step.of([1, 2, 2, 0, 0, 1], [0, 0, 1, 1, 2, 2], 0, 1, op=REDUCE)
    with pytest.raises(ScheduleError, match=r"rank 1 out\[0\]: chunk 0 is summed in another order than at rank 0"):
        verify(small("all_reduce", [COPIES, rows]))


def test_a_promised_order_is_held_to():
    from_1 = small("reduce", [Step.of([1, 2, 0], 0, 0, 1, op=[COPY, REDUCE, REDUCE])])
    verify(from_1)
    verify(replace(from_1, sum_from=(1, 0)))
    with pytest.raises(ScheduleError, match="chunk 0 is not summed in the promised order, rank 0 upwards"):
        verify(replace(from_1, sum_from=(0, 0)))


def test_in_place_a_read_of_the_input_may_come_too_late():
    # Rank 0 overwrites its chunk in step 0; in step 1 the others still want to read it.
    steps = [
        Step.of([0, 1, 2], 0, 0, 1, op=[COPY, REDUCE, REDUCE]),
        Step.of([0, 1, 2], 1, 0, 1, op=[COPY, REDUCE, REDUCE]),
        Step.of([0, 1, 2], 2, 0, 1, op=[COPY, REDUCE, REDUCE]),
    ]
    schedule = small("all_reduce", steps)
    verify(schedule)
    with pytest.raises(ScheduleError, match="in place: step 1, row"):
        verify(replace(schedule, in_place_ok=True))
    with pytest.raises(ScheduleError, match="does not allow input and output in the same memory"):
        verify(schedule, in_place=True)


def test_steps_without_rows_change_nothing():
    schedule = build("all_reduce", "mesh", 3)
    nothing = Step.of([], [], 0, 0)
    verify(with_steps(schedule, [step for s in schedule.steps() for step in (nothing, s, nothing)]))


# ---- the command


def test_the_command_proves_and_counts(capsys):
    assert main(["--op", "scatter", "--max-ranks", "4"]) == 0
    printed = capsys.readouterr().out
    assert "scatter" in printed
    assert "20 schedules of up to 4 ranks proven" in printed  # roots 1 + 2 + 3 + 4, two algorithms


def test_the_command_fails_with_the_first_broken_rule(capsys, monkeypatch):
    good: Callable[..., Schedule] = algorithms.ALGORITHMS["ring"]["all_gather"]
    damaged = lambda ranks: with_steps(good(ranks), list(good(ranks).steps())[:1])  # noqa: E731
    monkeypatch.setitem(algorithms.ALGORITHMS["ring"], "all_gather", damaged)
    assert main(["--op", "all_gather"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "not proven: all_gather by ring, 3 ranks, out of place: at the end, rank 0 out[1] holds nothing"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algo", "nhr"], "algorithm 'nhr' is not built yet"),
        (["--op", "all_to_all", "--algo", "ring"], "no ring algorithm for all_to_all"),
    ],
)
def test_the_command_refuses_what_does_not_exist(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
