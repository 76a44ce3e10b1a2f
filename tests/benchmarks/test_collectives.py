"""The benchmark runs, checks its results and writes what it measured. It promises no times: nor does this test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPS = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]

pytestmark = pytest.mark.processes


def benchmark(folder, *options):
    """Run it with two ranks for a moment; return (what it printed, what it wrote)."""
    file = folder / "rows.json"
    command = [sys.executable, ROOT / "benchmarks" / "collectives.py", "--ranks", "2", "--peers", "mpi", "--json", file]
    command += ["--rounds", "2", "--seconds", "0.01", *options]
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text(encoding="utf-8"))


def test_it_compares_every_collective_with_mpi(tmp_path):
    printed, report = benchmark(tmp_path, "--sizes", "8,12K")
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["cpu"]
    assert {"python", "numpy", "mpi4py", "mpi"} <= set(report["versions"])
    assert report["settings"]["rounds"] == 2
    rows = report["rows"]
    assert [(row["op"], row["bytes"]) for row in rows] == [(op, size) for op in OPS for size in (8, 12 * 1024)]
    for row in rows:
        assert row["part"] == "collective"
        assert (row["ranks"], row["peer"], row["buffer_bytes"]) == (2, "mpi", row["bytes"])
        assert (row["correct"], row["wrong"]) == (True, [])
        assert 0 < row["ours_best_s"] <= row["ours_median_s"]
        assert 0 < row["peer_best_s"] <= row["peer_median_s"]
        assert row["ratio_median"] == pytest.approx(row["peer_median_s"] / row["ours_median_s"])
        assert row["ratio_best"] == pytest.approx(row["peer_best_s"] / row["ours_best_s"])
        assert row["copy_s"] > 0
        assert row["bound_fraction"] == pytest.approx(row["copy_s"] / row["ours_median_s"])
        assert row["calls"] >= 2
        assert row["met"] in (True, False, None)
    assert rows[0]["target"] == 0.4  # 8 bytes, 2 ranks: at most 2.5 times the time of MPI
    for op in OPS:
        assert op in printed
    assert "12 KiB" in printed


def test_a_size_can_be_what_a_rank_gives_or_gets(tmp_path):
    _, report = benchmark(tmp_path, "--sizes", "1K", "--per-rank-size")
    assert {row["op"]: row["buffer_bytes"] for row in report["rows"]} == {
        "all_reduce": 1024,
        "reduce_scatter": 2048,
        "all_gather": 2048,
        "all_to_all": 1024,
    }


def test_it_says_where_the_microseconds_go(tmp_path):
    printed, report = benchmark(tmp_path, "--micro")
    rows = report["rows"]
    assert [row["part"] for row in rows] == ["empty_task", "empty_task", "small_split", "small_split", "startup"]
    for row in rows[:2]:
        assert 0 < row["ours_best_s"] <= row["ours_median_s"] <= row["ours_p99_s"]
    for row in rows[2:4]:
        assert row["correct"]
        assert min(row["ours_cpu_s"], row["peer_cpu_s"]) > 0
        parts = row["scheduler_s"] + row["call_s"] + row["exchange_s"] + row["waiting_s"]
        assert parts == pytest.approx(row["rank0_median_s"])
    assert rows[4]["ratio_median"] == pytest.approx(rows[4]["peer_median_s"] / rows[4]["ours_median_s"])
    assert "start-up" in printed
