"""Links between processes of one host: the peer's arena and board are mapped here, read and written in place.

The peer's anonymous files are reached through /proc/PID/fd (same user), so nothing has a name, nothing depends on the
size of /dev/shm, and nothing remains after `kill -9`.
"""

from __future__ import annotations

import os
import select

import numpy as np
from numpy.typing import NDArray

from device.memory import Segment
from hccl.errors import BrokenError
from hccl.record import Board, Record
from hccl.transport.base import Link, Member


class ShmLink(Link):
    """Direct link to a process of this host. Maps the peer's memory at construction.

    Raises: `BrokenError` when the peer has gone already or its memory cannot be opened.
    """

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        try:
            self._pidfd = os.pidfd_open(member.pid) if hasattr(os, "pidfd_open") else -1
        except ProcessLookupError:
            raise BrokenError(f"{member.who} has exited before its memory could be mapped") from None
        except OSError:  # kernels before 5.3, or forbidden by a sandbox: fall back to signal 0
            self._pidfd = -1
        try:
            self._arena = Segment.attach(member.arena)
            self._board_segment = Segment.attach(member.board)
        except OSError as error:
            self.close()
            raise BrokenError(
                f"the device memory of {member.who} cannot be mapped ({error}); ranks of one host must run as one user "
                "and see each other in /proc, else give them different servers (launch.py --servers)"
            ) from error
        self._memory = self._arena.array
        self._board = Board(self._board_segment)

    def find_record(self, key: int, ranks: int) -> Record | None:
        return self._board.find(key, ranks)

    def view(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        start = address - self.member.base
        return self._memory[start : start + nbytes]

    def gone(self) -> str | None:
        if self._pidfd >= 0:
            dead = bool(select.select([self._pidfd], [], [], 0)[0])
        else:
            try:
                os.kill(self.member.pid, 0)
                dead = False
            except ProcessLookupError:
                dead = True
            except PermissionError:
                dead = False
        return "its process has ended" if dead else None

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        for name in ("_arena", "_board_segment"):
            segment = self.__dict__.get(name)
            if segment is not None:
                segment.close()
