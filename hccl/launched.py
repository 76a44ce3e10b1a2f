"""What a rank that ``launch.py`` started knows of its launcher: a key-value store, a place for reports, its own start.

Two halves share one wire format. :func:`connect` gives the rank the launcher's store. :func:`main` is what the launcher
starts for every rank: a *guardian*, which forks the rank proper, tells the launcher exactly how it ended (MPI launchers
tell it late, in prose, or not at all) and takes it along when the guardian's own parent dies.

The wire: JSON objects, one a line; an object with ``size`` is followed by that many raw bytes. The address in
``HCCL_LAUNCH`` is ``@name`` (abstract unix socket: nothing on disk) or ``host:port``; whoever does not open with the
token of ``HCCL_LAUNCH_TOKEN`` is cut off. Standard library only, and little of it: every rank loads this file first.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType
    from typing import Any, NoReturn

    Message = dict[str, Any]

#: Asks a rank for its Python stack (faulthandler); a real-time signal where there is one: SIGUSR1 and 2 are the user's.
STACK_SIGNAL = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
#: Rank and rank-on-this-host, as the launchers of Open MPI, MPICH and PMIx name them.
MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "MPI_LOCALRANKID"),
    ("PMIX_RANK", "PMIX_LOCAL_RANK"),
)
_SECONDARY = {"BrokenError", "RankGoneError"}  # errors that another rank's end caused: never "the first failure"
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_REPLY_MARGIN_S = 10.0  # the launcher itself times a get; a client looks at its clock only when the launcher hangs


class LauncherError(RuntimeError):
    """Say that the launcher could not be reached, has gone, or that this client is closed."""


class RankGoneError(LauncherError):
    """Say that a value cannot come any more because a rank failed or left; ``rank`` names it."""

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class GetTimeoutError(LauncherError, TimeoutError):
    """Say that nobody put the value in time."""


def connect() -> Launcher | None:
    """Return a client of this process's launcher, or None when no launcher started it. The caller closes it.

    Reads ``HCCL_LAUNCH``, ``HCCL_LAUNCH_TOKEN`` and ``HCCL_RANK``.

    Raises:
        LauncherError: The variables are set, but nobody answers there.
    """
    address = os.environ.get("HCCL_LAUNCH")
    if not address:
        return None
    launcher = Launcher(address, os.environ.get("HCCL_LAUNCH_TOKEN", ""), int(os.environ.get("HCCL_RANK", "-1")))
    with launcher._lend():  # fail here, not at the first get
        pass
    return launcher


class Launcher:
    """Client of the launcher's store. Any number of threads may use it at once: each call has a connection of its own.

    Example::

        launcher = connect()
        launcher.put("root info", info)                            # on rank 0
        info = launcher.get("root info", timeout_s=30, source=0)   # on the others
    """

    def __init__(self, address: str, token: str, rank: int) -> None:
        self.address = address
        self.rank = rank
        self._token = token
        self._lock = threading.Lock()
        self._idle: list[_Channel] = []
        self._busy: set[_Channel] = set()
        self._owner = os.getpid()
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """Store ``value`` under ``key`` for all ranks; returns once the launcher has it. A later put replaces it.

        Raises:
            LauncherError: The launcher has gone, or this client is closed.
        """
        self._ask({"op": "put", "key": key}, value)

    def get(self, key: str, timeout_s: float, source: int | None = None) -> bytes:
        """Return the value of ``key``, waiting up to ``timeout_s`` (wall seconds) until somebody puts it.

        ``source`` is the rank that shall put it, where that is known: then the wait also ends when that rank leaves
        without an error.

        Raises:
            RankGoneError: A rank (``.rank``) failed, or ``source`` left, and the value was not there.
            GetTimeoutError: Nobody put it in time.
            LauncherError: The launcher has gone, or this client is closed.
        """
        request: Message = {"op": "get", "key": key, "timeout_s": timeout_s, "source": source}
        return self._ask(request, limit_s=timeout_s + _REPLY_MARGIN_S)[1]

    def report(self, kind: str, text: str) -> None:
        """Tell the launcher what this rank is doing, one line for each ``kind``; shown when the run fails or times out.

        Raises:
            LauncherError: The launcher has gone, or this client is closed.
        """
        self._ask({"op": "report", "kind": kind, "text": text})

    def close(self) -> None:
        """Drop the connections; harmless when repeated. Calls waiting in other threads end with LauncherError."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for channel in idle:
            channel.close()
        for channel in busy:
            channel.interrupt()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: Message, payload: bytes | None = None, limit_s: float = 60.0) -> tuple[Message, bytes]:
        with self._lend() as channel:
            reply, value = channel.ask(request, payload, limit_s)
        text = reply.get("error")
        if text is None:
            return reply, value
        if reply.get("kind") == "gone":
            raise RankGoneError(text, reply.get("rank"))
        raise GetTimeoutError(text) if reply.get("kind") == "timeout" else LauncherError(text)

    @contextmanager
    def _lend(self) -> Iterator[_Channel]:
        """Lend an idle connection, or a new one; one that broke is not taken back."""
        with self._lock:
            if self._closed:
                raise LauncherError("this client of the launcher is closed")
            if self._owner != os.getpid():  # in a forked child: the connections are its parent's
                self._owner, self._idle = os.getpid(), []
                self._busy.clear()
            channel = self._idle.pop() if self._idle else None
        if channel is None:
            channel = _Channel(self.address, {"role": "store", "rank": self.rank, "token": self._token})
        with self._lock:
            self._busy.add(channel)
        sound = False
        try:
            yield channel
            sound = True
        finally:
            with self._lock:
                self._busy.discard(channel)
                keep = sound and not self._closed
                if keep:
                    self._idle.append(channel)
            if not keep:
                channel.close()


class _Channel:
    """One connection to the launcher: a greeting, then questions and answers in turn."""

    def __init__(self, address: str, hello: Message, limit_s: float = 60.0) -> None:
        self.descriptors: list[int] = []
        self._buffer = bytearray()
        try:
            if address.startswith("@"):
                self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self.socket.settimeout(limit_s)
                self.socket.connect("\0" + address[1:])
            else:
                host, _, port = address.rpartition(":")
                self.socket = socket.create_connection((host, int(port)), limit_s)
        except OSError as error:
            raise LauncherError(f"no launcher answers at {address}: {error.strerror or error}") from error
        self.hello, _ = self.ask({"op": "hello", **hello}, None, limit_s)

    def send(self, message: Message, payload: bytes | None = None) -> None:
        if payload is not None:
            message = {**message, "size": len(payload)}
        data = json.dumps(message).encode() + b"\n"
        try:
            self.socket.sendall(data + payload if payload else data)
        except OSError as error:
            raise LauncherError(f"the launcher has gone: {error.strerror or error}") from error

    def ask(self, message: Message, payload: bytes | None, limit_s: float) -> tuple[Message, bytes]:
        self.socket.settimeout(limit_s)
        self.send(message, payload)
        while (end := self._buffer.find(b"\n")) < 0:
            self._receive()
        reply: Message = json.loads(self._buffer[:end])
        del self._buffer[: end + 1]
        size = reply.get("size", 0)
        while len(self._buffer) < size:
            self._receive()
        value = bytes(self._buffer[:size])
        del self._buffer[:size]
        return reply, value

    def _receive(self) -> None:
        try:
            if self.socket.family == getattr(socket, "AF_UNIX", None):
                data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 16, 3)
                self.descriptors += descriptors
            else:
                data = self.socket.recv(1 << 16)
        except TimeoutError as error:
            raise LauncherError("the launcher does not answer: it is stopped or overloaded") from error
        except OSError as error:
            raise LauncherError(f"the launcher has gone: {error.strerror or error}") from error
        if not data:
            raise LauncherError("the launcher has gone, or refused this connection")
        self._buffer += data

    def interrupt(self) -> None:
        """Make a call that waits in another thread end."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


# --- the start of a rank ------------------------------------------------------------------------------------------


def main() -> None:
    """Guard one rank: fork it, watch it, tell the launcher. Returns only in the rank, when its program has ended.

    The guardian keeps out of the way: no thread, no Python import beyond this file, asleep unless something happens.
    """
    rank = _identify()
    keeper = int(os.environ.get("HCCL_LAUNCH_KEEPER", "0"))
    if os.environ.get("HCCL_BACKEND") == "process":
        _die_with_parent(parent=keeper)
    else:
        _die_with_parent(orphanage=keeper)
    token = os.environ.get("HCCL_LAUNCH_TOKEN", "")
    stack_read, stack_write = os.pipe()
    signal_read, signal_write = os.pipe()
    for descriptor in (signal_read, signal_write):
        os.set_blocking(descriptor, False)
    try:
        link = _Channel(
            os.environ["HCCL_LAUNCH"],
            {"role": "guardian", "rank": rank, "token": token, "pid": os.getpid(), "host": socket.gethostname()},
        )
    except LauncherError as error:
        sys.exit(f"rank {rank}: {error}")
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # until the rank can answer it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher says when
    signal.signal(signal.SIGCHLD, _ignore)
    signal.signal(signal.SIGTERM, _ignore)
    signal.set_wakeup_fd(signal_write)
    guardian = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for descriptor in (stack_read, signal_read, signal_write):
            os.close(descriptor)
        link.close()
        os.setsid()  # a process group of its own, so that its children can be ended with it
        _die_with_parent(guardian)
        for target, descriptor in enumerate(link.descriptors):  # the launcher's own, or tagging pipes
            os.dup2(descriptor, target)
            os.close(descriptor)
        _answer_stack_signal(stack_write)
        _run(link.hello["kind"], link.hello["argv"], link.hello["path"])
        return
    os.close(stack_write)
    for descriptor in link.descriptors:
        os.close(descriptor)
    with suppress(LauncherError):
        _guard(link, pid, stack_read, signal_read)
    with suppress(OSError):  # the launcher has gone: so does the rank, and what it started
        os.killpg(pid, signal.SIGKILL)
    os._exit(1)


def _guard(link: _Channel, pid: int, stack_read: int, signal_read: int) -> NoReturn:
    """Serve the launcher until it says leave; raise LauncherError when it has gone."""
    link.send({"op": "started", "pid": pid})
    link.socket.settimeout(None)
    ended = terminated = False
    sources: list[Any] = [link.socket, stack_read, signal_read]
    while True:
        for source in select.select(sources, [], [])[0]:
            if source is link.socket:
                link._receive()
            elif source == stack_read:
                text = os.read(stack_read, 1 << 16)
                if text:
                    link.send({"op": "stack", "text": text.decode(errors="replace")})
                else:
                    sources.remove(stack_read)
            elif signal.SIGTERM in os.read(signal_read, 256) and not ended:  # the MPI launcher ends its job
                terminated = True
                with suppress(OSError):
                    os.killpg(pid, signal.SIGTERM)
        while (end := link._buffer.find(b"\n")) >= 0:
            order = json.loads(link._buffer[:end])
            del link._buffer[: end + 1]
            with suppress(OSError):
                if order["op"] == "leave":
                    os.killpg(pid, signal.SIGKILL)
                if order["op"] == "stack" and not ended:
                    os.kill(pid, STACK_SIGNAL)
                elif order["op"] == "signal":
                    os.killpg(pid, order["signum"])
            if order["op"] == "leave":
                os._exit(0)
        if not ended:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:  # stay: to an MPI launcher a process that leaves without finalizing is a reason to end the job
                ended = True
                code = os.waitstatus_to_exitcode(status)
                link.send({"op": "ended", "status": code, "terminated": terminated})


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Handle a signal by waking up only."""


def _identify() -> int:
    """Fill in HCCL_RANK and HCCL_LOCAL_RANK from what the MPI launcher set, and return the rank."""
    environ = os.environ
    if environ.get("HCCL_BACKEND") != "process":
        for rank_name, local_name in MPI_VARIABLES:
            if rank_name in environ:
                environ["HCCL_RANK"] = environ[rank_name]
                environ["HCCL_LOCAL_RANK"] = environ.get(local_name, environ[rank_name])
                break
    if "HCCL_RANK" not in environ:
        sys.exit(
            "launch.py: this mpirun sets none of " + ", ".join(names[0] for names in MPI_VARIABLES) + ": it is not an "
            "Open MPI or MPICH; name another with HCCL_MPIRUN, or use --backend process"
        )
    rank = int(environ["HCCL_RANK"])
    servers = environ.get("HCCL_SERVERS")
    if servers:  # logical servers: the NPU number within the server
        environ["HCCL_LOCAL_RANK"] = str(rank % int(servers.partition("x")[2]))
    environ.setdefault("HCCL_LOCAL_RANK", str(rank))
    return rank


def _die_with_parent(parent: int | None = None, orphanage: int = 1) -> None:
    """Ask the kernel to kill this process with its parent, and end at once if the parent is dead already.

    The request comes too late when the parent died before it: then getppid() is not ``parent``, or is ``orphanage``.
    """
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() in (1, orphanage) if parent is None else os.getppid() != parent:
        os._exit(1)


def _answer_stack_signal(descriptor: int) -> None:
    """Write this process's Python stacks to ``descriptor`` at STACK_SIGNAL, and at a crash to stderr."""
    import faulthandler

    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)
    faulthandler.enable()


def _run(kind: str, argv: list[str], path: str) -> None:
    """Run the program as Python itself would, as ``__main__``; report an uncaught error and exit with status 1."""
    import builtins
    import io
    from types import ModuleType

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # whole lines of several ranks mix well; blocks, or with PYTHONUNBUFFERED parts of lines, do not
            stream.reconfigure(line_buffering=True, write_through=False)
    if _ROOT not in sys.path:
        sys.path.append(_ROOT)  # a clone works without being installed
    sys.argv = argv
    program = ModuleType("__main__")
    program.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = program
    try:
        if kind == "module":
            import runpy

            sys.path[0] = os.getcwd()
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        elif os.path.isdir(path) or path.endswith((".zip", ".pyz")):
            import runpy

            runpy.run_path(path, run_name="__main__")
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(path))
            program.__file__ = path
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
            exec(code, program.__dict__)
    except SystemExit as stop:
        if stop.code not in (None, 0) and not isinstance(stop.code, int):
            _report({"summary": str(stop.code), "kind": "exit"})
        raise
    except BaseException as error:
        sys.exit(_report_error(error))


def _report_error(error: BaseException) -> int:
    """Send the error and its traceback to the launcher, which prints them in order; return the exit status."""
    import traceback

    if isinstance(error, KeyboardInterrupt):
        _report({"summary": "interrupted", "kind": "interrupt", "where": _where(error.__traceback__)})
        return 128 + signal.SIGINT
    trace = _user_frames(error.__traceback__)
    printed = sys.excepthook is not sys.__excepthook__  # the program's own way to show errors (rich, for example)
    if printed:
        sys.excepthook(type(error), error, trace)
    text = "".join(traceback.format_exception(type(error), error, trace))
    secondary = any(base.__name__ in _SECONDARY for base in type(error).__mro__)
    lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    summary = f"{lines[-1]} ({error.filename}:{error.lineno})" if isinstance(error, SyntaxError) else lines[0]
    message: Message = {"summary": summary, "kind": "error", "where": _where(trace), "traceback": text}
    if not _report({**message, "secondary": secondary, "printed": printed}) and not printed:
        sys.stderr.write(text)
    return 1


def _report(message: Message) -> bool:
    """Send one error report and wait until the launcher has it; False when there is no launcher any more."""
    sys.stdout.flush()
    rank, token = int(os.environ["HCCL_RANK"]), os.environ.get("HCCL_LAUNCH_TOKEN", "")
    try:
        channel = _Channel(os.environ["HCCL_LAUNCH"], {"role": "rank", "rank": rank, "token": token}, limit_s=5.0)
        channel.ask({"op": "error", **message}, None, 5.0)
    except LauncherError:
        return False
    channel.close()
    return True


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without this file's and runpy's frames at its outer end."""
    while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _where(trace: TracebackType | None) -> str:
    """Return ``file:line in function`` of the innermost frame of the user's own code, or nothing."""
    inside = tuple(os.path.join(_ROOT, name) + os.sep for name in ("hccl", "device", "parallel", "acl"))
    library = (*inside, os.path.dirname(os.__file__) + os.sep, "<frozen")
    place = ""
    while trace:
        code = trace.tb_frame.f_code
        if not place or not code.co_filename.startswith(library):
            place = f"{os.path.basename(code.co_filename)}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return place
