"""The library between real processes: started by mpirun, by launch.py, by torchrun's variables, by nothing at all."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess

import pytest

from .conftest import Processes, python

pytestmark = pytest.mark.processes


def reports(run: subprocess.CompletedProcess[str]) -> list[dict]:
    """Read what the ranks printed, in the order of the ranks; the run must have been good."""
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda report: report["rank"])


# ----------------------------------------------------------------------------------------------------------- operations
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_operations_under_mpirun_alone(processes, ranks):
    found = reports(processes.mpirun(ranks, "operations.py"))
    assert [(r["rank"], r["size"]) for r in found] == [(rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [4, 8])
def test_all_operations_under_the_launcher(processes, ranks):
    found = reports(processes.finish(processes.launch("-n", ranks, program="operations.py")))
    assert [(r["rank"], r["size"]) for r in found] == [(rank, ranks) for rank in range(ranks)]
    assert all(r["sent"] for r in found)


@pytest.mark.parametrize(("servers", "ranks"), [("2x2", 4), ("3x1", 3)])
def test_all_operations_between_servers_that_share_no_memory(processes, servers, ranks):
    """The program checks that links to other servers carry messages."""
    run = processes.finish(processes.launch("--servers", servers, program="operations.py", arguments=(servers,)))
    assert len(reports(run)) == ranks


# --------------------------------------------------------------------------------------------------------- disagreement
CALLS = {
    "count": ("all_reduce(5 float32, op sum, ", "all_reduce(4 float32, op sum, "),
    "dtype": ("all_reduce(4 int32, op sum, ", "all_reduce(4 float32, op sum, "),
    "op": ("all_reduce(4 float32, op max, ", "all_reduce(4 float32, op sum, "),
    "root": ("broadcast(4 float32, root 1, ", "broadcast(4 float32, root 0, "),
    "operation": ("all_gather(4 float32, ", "all_reduce(4 float32, op sum, "),
    "order": ("all_reduce(4 float32, op sum, ", "broadcast(4 float32, root 0, "),
}


@pytest.mark.parametrize("options", [("-n", 3), ("--servers", "2x1"), ("--servers", "2x2")])
def test_two_communicators_work_side_by_side(processes, options):
    """Their messages go between the same processes and must not be taken for each other's."""
    run = processes.finish(processes.launch(*options, program="side_by_side.py"))
    assert run.returncode == 0, run.stderr
    assert "all right" in run.stdout


@pytest.mark.parametrize("options", [("-n", 3), ("--servers", "2x2")], ids=["one server", "two servers"])
def test_ranks_that_disagree_fail_on_every_rank_with_both_calls_printed(processes, options):
    for report in reports(processes.finish(processes.launch(*options, program="mismatches.py"))):
        assert report["errors"].keys() == CALLS.keys()
        for case, (kind, text) in report["errors"].items():
            assert kind == "DisagreementError", text
            assert text.startswith(f"rank {report['rank']}")
            assert all(call in text for call in CALLS[case]), text


def test_a_program_whose_ranks_disagree_ends_with_both_calls_on_stderr(processes):
    run = processes.finish(processes.launch("-n", 3, program="forever.py", arguments=("mismatch",)))
    assert run.returncode == 1
    assert "DisagreementError" in run.stderr
    assert "all_reduce(5000 float32, op max" in run.stderr
    assert "all_reduce(4999 float32, op max" in run.stderr


# ----------------------------------------------------------------------------------------------------- a rank that dies
@pytest.mark.parametrize("options", [("-n", 4), ("--servers", "2x2")], ids=["one server", "two servers"])
def test_kill_9_of_a_rank_ends_the_others_with_an_error_that_names_it(processes, options):
    """The fixture looks for processes and shared memory files that are left."""
    run = processes.launch(*options, "-v", program="forever.py")
    pids = dict(re.match(r"rank (\d) pid (\d+)", run.stdout.readline()).groups() for _ in range(4))
    os.kill(int(pids["2"]), signal.SIGKILL)
    ended = processes.finish(run)
    assert ended.returncode == 128 + signal.SIGKILL
    for rank in "013":
        pattern = rf"BrokenError: rank {rank}: all_reduce #\d+ .*rank 2 \(pid {pids['2']}\).*its process has ended"
        assert re.search(pattern, ended.stderr), f"rank {rank} said nothing of it:\n{ended.stderr}"


# -------------------------------------------------------------------------------------------------- other ways to start
def test_torchrun_s_variables_are_enough(processes: Processes, free_port: int) -> None:
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    ranks = [processes.start(python("operations.py"), RANK=str(rank), **common) for rank in range(3)]
    for rank, process in enumerate(ranks):
        (report,) = reports(processes.finish(process))
        assert (report["rank"], report["size"]) == (rank, 3)


def test_root_info_through_a_file_needs_no_world(processes, tmp_path):
    ranks = [processes.start([*python("join.py"), tmp_path / "info", rank, 2]) for rank in (1, 0)]
    said = sorted(processes.finish(process).stdout for process in ranks)
    assert said == ["rank 0 of 2: 3\n", "rank 1 of 2: 3\n"]


def test_a_process_alone_is_a_world_of_one(processes):
    (report,) = reports(processes.finish(processes.start(python("operations.py"))))
    assert report == {"rank": 0, "size": 1, "sent": {}}
