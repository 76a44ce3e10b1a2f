"""Schedules as text: one assignment per transfer."""

from __future__ import annotations

from hccl.algorithms import build
from hccl.render import text
from hccl.schedule import REDUCE, Schedule, Step


def test_a_ring_reads_as_assignments():
    assert text(build("all_reduce", "ring", 3)).splitlines() == [
        "all_reduce by ring, 3 ranks",
        "chunk = 1/3 of the whole buffer; chunks per rank: in 3, out 3, scratch 0; in and out may be one",
        "step 0, local",
        "  0.out[0:3] = 0.in[0:3]   1.out[0:3] = 1.in[0:3]   2.out[0:3] = 2.in[0:3]",
        "step 1, pulled",
        "  1.out[2] += 0.out[2]   2.out[0] += 1.out[0]   0.out[1] += 2.out[1]",
        "step 2, pulled",
        "  1.out[1] += 0.out[1]   2.out[2] += 1.out[2]   0.out[0] += 2.out[0]",
        "step 3, pulled",
        "  1.out[0] = 0.out[0]   2.out[1] = 1.out[1]   0.out[2] = 2.out[2]",
        "step 4, pulled",
        "  1.out[2] = 0.out[2]   2.out[0] = 1.out[0]   0.out[1] = 2.out[1]",
    ]


def test_the_root_is_named_and_pushes_are_told_from_pulls():
    lines = text(build("gather", "mesh", 2, root=1)).splitlines()
    assert lines[0] == "gather by mesh, 2 ranks, root 1"
    assert lines[2:] == ["step 0, pushed", "  1.out[0] = 0.in[0]   1.out[1] = 1.in[0]"]


def test_strides_and_lanes_are_shown():
    step = Step.of(0, 1, 1, 8, stride=2, count=3, op=REDUCE, lane=1)
    schedule = Schedule("all_reduce", "handmade", 2, 7, 7, 7, 0, lambda: [step, Step.of([], [], 0, 0)])
    assert text(schedule).splitlines()[2:] == [
        "step 0, pulled",
        "  1.out[1:6:2] += 0.in[1:6:2] (lane 1)",
        "step 1, local",
    ]


def test_long_steps_are_cut_and_counted():
    lines = text(build("all_to_all", "mesh", 8), width=60, max_rows=10).splitlines()
    assert lines[-1] == "  … and 54 more rows"
    assert all(len(line) <= 60 for line in lines[3:])
