"""Links between hosts (or servers forced apart): record lines and data travel as MPI messages.

One duplicated MPI communicator per process carries everything: control messages under tag 1, data under tags that the
sender hands out, so that two transfers of one pair never meet. The engine is polled from the wait loop; it needs
MPI_THREAD_MULTIPLE because user threads and the scheduler's daemon both come here.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import defaultdict, deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hccl.errors import UnsupportedError
from hccl.record import ALIVE, STATE, Record, record_bytes
from hccl.transport.base import Link, Member, Transfer

_CONTROL_TAG = 1
_MAX_MESSAGE = 1 << 30  # bytes of one MPI message; counts of MPI are C ints
_FAREWELL_S = 2.0


class _Parts:
    """A transfer that was cut in messages of at most `_MAX_MESSAGE` bytes."""

    __slots__ = ("_requests",)

    def __init__(self, requests: list[Any]) -> None:
        self._requests = requests

    def done(self) -> bool:
        while self._requests and self._requests[-1].Test():
            self._requests.pop()
        return not self._requests


class MpiEngine:
    """This process's end of all its message links."""

    def __init__(self, mpi_comm: Any = None) -> None:
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UnsupportedError(
                "the mpi transport needs MPI_THREAD_MULTIPLE, but MPI was initialised with less; "
                "start through launch.py, or initialise with mpi4py.rc.thread_level = 'multiple'"
            )
        self._mpi = MPI
        self.comm = (MPI.COMM_WORLD if mpi_comm is None else mpi_comm).Dup()
        self._lock = threading.Lock()
        self._shadows: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._early: dict[tuple[int, int], list[NDArray[np.int64]]] = defaultdict(list)
        self._outgoing: deque[tuple[Any, NDArray[np.int64], int]] = deque()  # request, message, peer
        self.closed = False

    def shadow(self, source: int, key: int, ranks: int) -> Record:
        """Return the shadow of `source`'s record of communicator `key`, with everything that came for it so far."""
        with self._lock:
            words = self._shadows.get((source, key))
            if words is None:
                words = np.zeros(record_bytes(ranks) // 8, np.int64)
                self._shadows[source, key] = words
                for message in self._early.pop((source, key), []):
                    _apply(words, message)
        return Record(memoryview(words.data).cast("B"), int(words.ctypes.data), 0)

    def publish(self, peer: int, record: Record, key: int, first: int, count: int) -> None:
        """Send words of this rank's record to `peer`."""
        message = np.empty(2 + count, np.int64)
        message[0], message[1] = key, first
        message[2:] = record.q[first : first + count]
        with self._lock:
            while self._outgoing and self._outgoing[0][0].Test():
                self._outgoing.popleft()
            self._outgoing.append((self.comm.Isend(message, peer, _CONTROL_TAG), message, peer))

    def poll(self) -> None:
        """Take in all control messages that have arrived."""
        if self.closed or not self._lock.acquire(False):
            return  # somebody else is at it
        try:
            status = self._mpi.Status()
            while self.comm.Iprobe(self._mpi.ANY_SOURCE, _CONTROL_TAG, status):
                message = np.empty(status.Get_count(self._mpi.INT64_T), np.int64)
                self.comm.Recv(message, status.source, _CONTROL_TAG)
                where = (status.source, int(message[0]))
                words = self._shadows.get(where)
                if words is None:
                    self._early[where].append(message)
                else:
                    _apply(words, message)
        finally:
            self._lock.release()

    def send(self, peer: int, data: NDArray[np.uint8], tag: int) -> Transfer:
        """Start sending `data` (contiguous bytes)."""
        return _Parts([self.comm.Isend(part, peer, tag) for part in _parts(data)])

    def receive(self, peer: int, data: NDArray[np.uint8], tag: int) -> Transfer:
        """Start receiving into `data` (contiguous bytes)."""
        return _Parts([self.comm.Irecv(part, peer, tag) for part in _parts(data)])

    def close(self) -> None:
        """Let last words leave for those who still listen, then stop.

        MPI_Finalize frees the duplicated communicator (freeing is collective).
        """
        if self.closed:
            return
        limit = time.monotonic() + _FAREWELL_S
        while time.monotonic() < limit and any(self._is_awaited(*entry) for entry in self._outgoing):
            self.poll()
            os.sched_yield()
        self.closed = True

    def _is_awaited(self, request: Any, message: NDArray[np.int64], peer: int) -> bool:
        """Tell whether a control message has not left yet and its receiver has not closed the communicator."""
        words = self._shadows.get((peer, int(message[0])))
        return not request.Test() and (words is None or words[STATE] == ALIVE)


def _apply(words: NDArray[np.int64], message: NDArray[np.int64]) -> None:
    """Copy a control message into a shadow; the first word of a line says "new", so it is written last."""
    first = int(message[1])
    body = message[2:]
    words[first + 1 : first + len(body)] = body[1:]
    words[first] = body[0]


def _parts(data: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    return [data[start : start + _MAX_MESSAGE] for start in range(0, len(data), _MAX_MESSAGE)]


class MpiLink(Link):
    """Message link to the MPI rank with the peer's world rank."""

    direct = False

    def __init__(self, member: Member, engine: MpiEngine, same_host: bool) -> None:
        super().__init__(member)
        self._engine = engine
        self._pidfd = -1
        if same_host:
            with contextlib.suppress(OSError, AttributeError):
                self._pidfd = os.pidfd_open(member.pid)

    def find_record(self, key: int, ranks: int) -> Record | None:
        return self._engine.shadow(self.member.rank, key, ranks)

    def view(self, address: int, nbytes: int) -> None:
        return None

    def gone(self) -> str | None:
        if self._pidfd >= 0 and select.select([self._pidfd], [], [], 0)[0]:
            return "its process has ended"
        return None

    def publish(self, record: Record, key: int, first: int, count: int) -> None:
        self._engine.publish(self.member.rank, record, key, first, count)

    def poll(self) -> None:
        self._engine.poll()

    def send(self, data: NDArray[np.uint8], tag: int) -> Transfer:
        return self._engine.send(self.member.rank, data, tag)

    def receive(self, data: NDArray[np.uint8], tag: int) -> Transfer:
        return self._engine.receive(self.member.rank, data, tag)

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
