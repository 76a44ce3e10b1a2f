"""Real processes for the tests: mpirun, launch.py, or plain; and nothing may be left of them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs")
LIMIT_S = 120  # of a run that hangs; no test measures time
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class Processes:
    """Starts the programs of one test and finds what is left of them."""

    def __init__(self) -> None:
        self.mark = f"HCCL_TEST_RUN={uuid.uuid4().hex}"
        self.started: list[subprocess.Popen[str]] = []
        self.shm_before = self._shm()

    def start(self, command: list[object], **environment: str) -> subprocess.Popen[str]:
        name, _, value = self.mark.partition("=")
        process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **MPI_ENVIRONMENT, "PYTHONPATH": str(ROOT), name: value, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        out, err = process.communicate(timeout=LIMIT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def mpirun(self, ranks: int, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a program by mpirun alone."""
        return self.finish(self.start([mpirun(), "-n", ranks, *python(program), *arguments]))

    def launch(self, *options: object, program: str, arguments: tuple[object, ...] = ()) -> subprocess.Popen[str]:
        """Start a program by launch.py over MPI."""
        mpirun()
        return self.start([sys.executable, ROOT / "launch.py", *options, PROGRAMS / program, *arguments])

    def left(self) -> list[str]:
        """Name the processes and shared memory files of this test that are still there."""
        found, mapped = [], set()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit():
                    maps = (entry / "maps").read_text()
                    mapped |= {word for line in maps.splitlines() for word in line.split()[5:6] if "/dev/shm" in word}
                    if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(f"process {entry.name}: {(entry / 'cmdline').read_bytes()!r}")
        # What another program maps, or another launcher made, is not ours to judge.
        ours = tuple(f"/dev/shm/hccl-launch-{process.pid}-" for process in self.started)
        new = self._shm() - self.shm_before - mapped
        return found + sorted(f for f in new if f.startswith(ours) or "/hccl-launch-" not in f)

    @staticmethod
    def _shm() -> set[str]:
        folder = Path("/dev/shm")
        return {str(path) for path in folder.iterdir()} if folder.exists() else set()


def mpirun() -> str:
    """Find the mpirun beside this Python, else on PATH; without any the test is skipped."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("there is no mpirun, neither beside this Python nor on PATH")
    return found


def python(program: str) -> list[object]:
    return [sys.executable, PROGRAMS / program]


@pytest.fixture
def processes() -> Iterator[Processes]:
    runs = Processes()
    yield runs
    for process in runs.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    end = time.monotonic() + 10
    while left := runs.left():
        assert time.monotonic() < end, left
        time.sleep(0.02)


@pytest.fixture
def free_port() -> int:
    """Give a port such that it and the next one are free now."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            second.bind(("127.0.0.1", port + 1))
            return port
    pytest.skip("there are no two free ports in a row")
