"""Simulated time is HCCL's cost formula where that is known, and the recurrence of the schedules everywhere."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hccl.algorithms import build, built, variants
from hccl.errors import ArgumentError
from hccl.schedule import REDUCE, Schedule, Step
from hccl.simulate import main, matrix, simulate, size, summary
from hccl.topology import Topology, preset, uniform

# HCCL's cost table (algorithm documentation): n bytes of the whole buffer, p ranks.
FORMULAS = {
    ("all_reduce", "ring"): lambda a, b, g, n, p: 2 * (p - 1) * a + 2 * (p - 1) / p * n * b + (p - 1) / p * n * g,
    ("all_gather", "ring"): lambda a, b, g, n, p: (p - 1) * a + (p - 1) / p * n * b,
    ("reduce_scatter", "ring"): lambda a, b, g, n, p: (p - 1) * a + (p - 1) / p * n * (b + g),
    ("broadcast", "ring"): lambda a, b, g, n, p: (p - 1) * (a + n * b),
    ("reduce", "ring"): lambda a, b, g, n, p: (p - 1) * (a + n * b + n * g),
    ("scatter", "ring"): lambda a, b, g, n, p: (p - 1) * a + (p - 1) / p * n * b,
    ("gather", "ring"): lambda a, b, g, n, p: (p - 1) * a + (p - 1) / p * n * b,
    ("all_reduce", "mesh"): lambda a, b, g, n, p: 2 * a + 2 * n * b / p + (p - 1) / p * n * g,
    ("all_gather", "mesh"): lambda a, b, g, n, p: a + n * b / p,
    ("reduce_scatter", "mesh"): lambda a, b, g, n, p: a + n * b / p + (p - 1) / p * n * g,
    ("broadcast", "mesh"): lambda a, b, g, n, p: 2 * a + 2 * n * b / p,
    ("reduce", "mesh"): lambda a, b, g, n, p: 2 * a + 2 * n * b / p + (p - 1) / p * n * g,
    ("scatter", "mesh"): lambda a, b, g, n, p: a + n * b / p,
    ("gather", "mesh"): lambda a, b, g, n, p: a + n * b / p,
    ("all_to_all", "mesh"): lambda a, b, g, n, p: a + n * b / p,
}
ONE_SHOT = {
    "all_reduce": lambda a, b, g, n, p: a + n * b + (p - 1) * n * g,
    "reduce": lambda a, b, g, n, p: a + n * b + (p - 1) * n * g,
    "broadcast": lambda a, b, g, n, p: a + n * b,
}


def some_constants(rng: np.random.Generator) -> tuple[float, float, float, float]:
    return (
        rng.uniform(1e-7, 1e-4),
        1 / rng.uniform(1e9, 4e11),
        1 / rng.uniform(1e9, 1e12),
        float(rng.integers(1, 2**32)),
    )


@pytest.mark.parametrize(("op", "algo"), built())
def test_uniform_links_give_hccl_s_cost_formula(op, algo):
    rng = np.random.default_rng(7)
    for ranks in [*range(2, 20), 31, 32, 33, 64]:
        a, b, g, n = some_constants(rng)
        topology = uniform(ranks, a, b, g)
        for options in variants(op, algo, ranks):
            formula = ONE_SHOT[op] if options.get("one_shot") else FORMULAS[op, algo]
            got = simulate(build(op, algo, ranks, **options), topology, n).max()
            assert got == pytest.approx(formula(a, b, g, n, ranks), rel=1e-9), (ranks, options)


def slowly(schedule: Schedule, topology: Topology, nbytes: float, enter: list[float]) -> list[float]:
    """The recurrence, one row after the other, for links that nobody shares."""
    clock = list(enter)
    for step in schedule.steps():
        after = list(clock)
        reduced = [0.0] * schedule.ranks
        for i in range(len(step)):
            s, d = int(step.src[i]), int(step.dst[i])
            size = int(step.count[i]) * nbytes / schedule.chunks
            if s != d:
                end = max(clock[s], clock[d]) + float(topology.alpha(s, d)) + size * float(topology.beta(s, d))
                after[s], after[d] = max(after[s], end), max(after[d], end)
            if step.op[i] == REDUCE:
                reduced[d] += size
        clock = [t + r * topology.gamma_s_per_byte for t, r in zip(after, reduced, strict=True)]
    return clock


@pytest.mark.parametrize(("op", "algo"), built())
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_clocks_that_enter_apart_follow_the_recurrence(op, algo, ranks):
    rng = np.random.default_rng(ranks)
    topology = uniform(ranks, 3e-6, 2e-10, 5e-11)
    for options in variants(op, algo, ranks):
        schedule = build(op, algo, ranks, **options)
        enter = rng.uniform(0, 2e-4, ranks)
        expected = slowly(schedule, topology, 1e6, enter.tolist())
        np.testing.assert_allclose(simulate(schedule, topology, 1e6, enter), expected, rtol=1e-13)


@pytest.mark.parametrize(("op", "algo"), built())
@pytest.mark.parametrize(
    "topology", [uniform(6, 3e-6, 2e-10, 5e-11), preset("a2-cluster", servers="2x3"), preset("a3", ranks=6)]
)
def test_a_batch_gives_the_same_bits_as_one_by_one(op, algo, topology):
    enter = np.random.default_rng(3).uniform(0, 1e-4, (6, 5))
    for options in variants(op, algo, 6):
        schedule = build(op, algo, 6, **options)
        batch = simulate(schedule, topology, 123457, enter)
        alone = np.stack([simulate(schedule, topology, 123457, column) for column in enter.T], axis=1)
        assert batch.tobytes() == alone.tobytes()
        assert simulate(schedule, topology, 123457).tobytes() == simulate(schedule, topology, 123457, [0] * 6).tobytes()


@pytest.mark.parametrize(("op", "algo"), built())
def test_the_matrix_gives_what_the_simulation_gives(op, algo):
    rng = np.random.default_rng(5)
    for ranks in (1, 2, 7):
        topology = uniform(ranks, *some_constants(rng)[:3])
        for options in variants(op, algo, ranks):
            schedule = build(op, algo, ranks, **options)
            m = matrix(schedule, topology, 1e6)
            for _ in range(3):
                enter = rng.uniform(0, 1e-3, ranks)
                np.testing.assert_allclose(
                    (enter + m).max(axis=1), simulate(schedule, topology, 1e6, enter), rtol=1e-12
                )


def test_the_matrix_shows_who_waits_for_whom():
    inf = -np.inf
    m = matrix(build("scatter", "mesh", 3, root=1), uniform(3, 1.0, 1.0), nbytes=6)
    assert m.tolist() == [[3, 3, inf], [3, 3, 3], [inf, 3, 3]]
    assert matrix(build("all_reduce", "ring", 1), uniform(1, 1.0, 1.0), 4).tolist() == [[0]]


def test_a_late_rank_delays_those_who_need_it():
    exit_s = simulate(build("all_gather", "mesh", 4), uniform(4, 1.0, 0.0), 4, enter=[0, 0, 10, 0])
    assert exit_s.tolist() == [11, 11, 11, 11]
    exit_s = simulate(build("broadcast", "ring", 4), uniform(4, 1.0, 0.0), 4, enter=[0, 0, 10, 0])
    assert exit_s.tolist() == [1, 11, 12, 12]  # rank 1 has handed on only when rank 2 has come


def test_one_rank_and_schedules_without_rows_take_no_time():
    for op, algo in built():
        assert simulate(build(op, algo, 1), uniform(1, 1.0, 1.0, 0.0), 100).tolist() == [0]
    empty = replace(build("all_reduce", "mesh", 3), source=lambda: [Step.of([], [], 0, 0)])
    for nothing in (empty, replace(empty, source=list)):
        assert simulate(nothing, uniform(3, 1.0, 1.0, 1.0), 8, [1, 2, 3]).tolist() == [1, 2, 3]


def test_local_copies_are_free_and_local_reductions_are_not():
    local = Step.of([0, 1], [0, 1], 0, 1, op=[0, REDUCE])
    schedule = Schedule("all_reduce", "handmade", 2, 1, 1, 1, 0, lambda: [local])
    assert simulate(schedule, uniform(2, 1.0, 1.0, 0.5), 10).tolist() == [0, 5]


def test_two_transfers_over_one_wire_share_it():
    step = Step.of([0, 0, 1], [1, 1, 0], 0, 1, count=[1, 2, 1])
    schedule = Schedule("all_reduce", "handmade", 2, 1, 1, 1, 0, lambda: [step])
    assert simulate(schedule, uniform(2, 1.0, 0.1), 10).tolist() == [4, 4]  # 30 bytes one way; the other way is free


def test_transfers_between_servers_share_the_rank_s_interface():
    topology = preset("a2-cluster", servers="2x4")
    nbytes = 8 * 22.5e9  # each chunk takes one second through the interface
    # Each rank sends to 4 others of the other server through its one interface, and to 3 over a wire each.
    assert simulate(build("all_gather", "mesh", 8), topology, nbytes).max() == pytest.approx(4, rel=1e-5)
    gathered = simulate(build("gather", "mesh", 8, root=5), topology, nbytes)
    assert gathered[5] == pytest.approx(4, rel=1e-5)  # the receiver's interface is the bottleneck


@pytest.mark.parametrize(
    ("cards", "all_gather", "all_reduce", "within"),
    [(2, 38, 18, 0.04), (4, 64, 30, 0.25), (8, 149, 72, 0.04)],
)
def test_the_a2_preset_meets_measured_rates(cards, all_gather, all_reduce, within):
    # algbw in GB/s of 910B cards in one server (limulidae README), large buffers. 4 cards is the outlier of the series.
    for op, measured in (("all_gather", all_gather), ("all_reduce", all_reduce)):
        algbw = summary(build(op, "mesh", cards), preset("a2", ranks=cards), 2**30)["algbw_gb_per_s"]
        assert algbw == pytest.approx(measured, rel=within)


def test_what_does_not_fit_together_is_refused():
    schedule = build("all_reduce", "ring", 4)
    with pytest.raises(ArgumentError, match="the schedule is for 4 ranks, the topology 'a2' has 8"):
        simulate(schedule, preset("a2"), 8)
    with pytest.raises(ArgumentError, match="nbytes is 0 or more and finite, got -1"):
        simulate(schedule, uniform(4, 0, 0), -1)
    with pytest.raises(ArgumentError, match=r"enter has shape \(4,\) or \(4, K\), got \(3,\)"):
        simulate(schedule, uniform(4, 0, 0), 8, [0, 0, 0])


def test_enter_times_are_not_changed():
    enter = np.zeros(4)
    simulate(build("all_reduce", "ring", 4), uniform(4, 1, 1), 8, enter)
    assert enter.tolist() == [0, 0, 0, 0]


def test_summary_counts_bytes_and_rates():
    figures = summary(build("all_reduce", "mesh", 4), uniform(4, 1e-6, 1e-9), 1000)
    assert figures["steps"] == 3
    assert figures["transfers"] == 24
    assert figures["bytes_sent_per_rank"] == 1500
    assert figures["virtual_s"] == pytest.approx(2.5e-6)
    assert figures["latency_s"] == pytest.approx(2e-6)
    assert figures["algbw_gb_per_s"] == pytest.approx(0.4)
    assert figures["busbw_gb_per_s"] == pytest.approx(0.6)


# ---- the command

COMMAND = ["--op", "all_reduce", "--algo", "ring", "--ranks", "8", "--bytes", "1M"]


def test_the_command_prints_one_json_object(capsys):
    assert main([*COMMAND, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["op"], figures["ranks"], figures["bytes"], figures["topology"]) == ("all_reduce", 8, 2**20, "a2")
    assert figures["virtual_s"] == pytest.approx(14 * 2e-6 + 14 / 8 * 2**20 / 18.6e9)


def test_the_command_takes_constants_options_and_servers(capsys):
    assert main([*COMMAND, "--alpha", "1e-6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["virtual_s"] == pytest.approx(14e-6)
    assert main([*COMMAND, "--servers", "2x4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["topology"] == "a2-cluster"
    arguments = [
        "--op",
        "reduce",
        "--algo",
        "mesh",
        "--ranks",
        "3",
        "--bytes",
        "9",
        "--root",
        "2",
        "--one-shot",
        "--render",
    ]
    assert main([*arguments, "--json"]) == 0
    assert "root 2" in json.loads(capsys.readouterr().out)["schedule"]


def test_the_command_prints_a_table_and_the_schedule(capsys):
    assert main([*COMMAND, "--render"]) == 0
    printed = capsys.readouterr().out
    assert "step 14, pulled" in printed
    assert "126.656 µs" in printed


def test_the_command_says_what_looks_like_a_mistake(capsys):
    assert main([*COMMAND, "--beta", "20", "--json"]) == 0
    assert "is the unit seconds per byte?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "a5"], "no topology preset 'a5': there are a2, a2-cluster, a3"),
        (["--topology", "a2", "--alpha", "1"], "give them or --topology, not both"),
        (["--algo", "nb"], "algorithm 'nb' is not built yet"),
        (["--ranks", "9", "--topology", "a2"], "'a2' has at most 8 ranks"),
        (["--root", "1"], "no option 'root'"),
    ],
)
def test_the_command_refuses_in_a_sentence(arguments, message, capsys):
    assert main([*COMMAND, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_sizes_are_written_as_in_hccl_test():
    assert [size(text) for text in ("0", "1000", "8K", "1m", "2G")] == [0, 1000, 8192, 2**20, 2**31]
    for wrong in ("", "K", "1.5M", "-1", "1T"):
        with pytest.raises(ValueError, match="a size is a number"):
            size(wrong)
