"""What does a rank hold for all its communicators? Its device, its board, and one link to each member of the world.

Sub-communicators share the fabric of the communicator that they come from, so making one costs no traffic: a member
opens a record on its own board, the others find it there at the first call. The fabric is closed with the last of them.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from device import Device
from hccl.record import CLOSED, Board, key_of
from hccl.transport import Link, Member

if TYPE_CHECKING:
    from hccl.endpoint import Endpoint


def domains(members: Sequence[Member]) -> list[int]:
    """Number what shares memory: members of one host and one logical server."""
    seen: dict[tuple[str, int], int] = {}
    return [seen.setdefault((m.host, m.server), len(seen)) for m in members]


class Fabric:
    """Links of one rank, by world rank. `owns_device`: closing the fabric closes the device too."""

    def __init__(
        self,
        device: Device,
        board: Board,
        links: Sequence[Link],
        *,
        owns_device: bool,
        engine: Any = None,
        threads: bool = False,
    ) -> None:
        self.device = device
        self.board = board
        self.links = list(links)
        self.domains = domains([link.member for link in links])
        self.engine = engine  # of message links, None when all peers share memory
        self.reporter: Callable[[str, str], None] | None = None  # takes (kind, text) to the launcher
        self._owns_device = owns_device
        self._threads = threads  # peers of this process still read the board: it goes with the last of them
        self._users = 0
        self._open: weakref.WeakSet[Endpoint] = weakref.WeakSet()
        self._tags = itertools.count()
        self._names: set[str] = set()  # of open communicators
        self._openings: dict[tuple[str, tuple[int, ...]], int] = {}
        self._lock = threading.Lock()

    def member(self, rank: int) -> Member:
        """What world rank `rank` told about itself."""
        return self.links[rank].member

    def open_name(self, name: str, members: tuple[int, ...]) -> int:
        """Return the key for the next communicator of this name and these members. Raises KeyError while one is open.

        All members open it equally often, so counting keeps who opens a name again away from its peers' old records.
        """
        with self._lock:
            if name in self._names:
                raise KeyError(name)
            self._names.add(name)
            number = self._openings[name, members] = self._openings.get((name, members), 0) + 1
        return key_of(f"{name} #{number} of {members}")

    def close_name(self, name: str) -> None:
        """Let the name be used again."""
        with self._lock:
            self._names.discard(name)

    def next_tag(self) -> int:
        """A message tag (2 … 2²⁰) that nothing else under way from this rank uses, on whatever communicator."""
        return next(self._tags) % ((1 << 20) - 2) + 2

    def retain(self, user: Endpoint) -> None:
        """One more communicator uses this fabric."""
        with self._lock:
            self._users += 1
            self._open.add(user)

    def say_goodbye(self) -> None:
        """Tell the peers that this rank ends without having closed: MPI_Finalize, which comes next, waits for them."""
        for user in list(self._open):
            if not user.closed:
                user.leave(CLOSED, f"ended after {user.turn} calls without closing the communicator", in_haste=True)

    def release(self, failed: bool = False) -> None:
        """One communicator less; the last one closes everything, without waiting or complaint if it `failed`."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        atexit.unregister(self.say_goodbye)
        if self.engine is not None:
            self.engine.close()
        for link in self.links:
            link.close()
        if not self._threads:
            self.board.segment.close()
        if self._owns_device:
            if failed:
                self.device.abort()
            else:
                self.device.close()
