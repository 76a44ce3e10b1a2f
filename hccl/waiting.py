"""What does a rank wait for, and when is waiting hopeless? The waits of collectives and of send/recv.

A wait knows whom it waits for, so that its description can. `check` runs after each nap: it raises when a peer has said
its last words, when a peer's process has ended, when the limit has passed, or when ranks wait for each other in a
circle. The circle is found from the records alone: each rank that has waited for a while says in which kind of call it
is blocked, and whose words are still missing can be read off the lines by anybody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from device.wait import Wait
from hccl import record as rec
from hccl.errors import BrokenError, DisagreementError, TimeoutError

if TYPE_CHECKING:
    from hccl.endpoint import Endpoint
    from hccl.transport import Transfer

_LOOK_S = 0.02  # liveness of peers is looked at this often
_REPORT_S = 1.0  # so long a wait is worth telling the launcher
_CIRCLE_S = 0.5  # a wait this long is suspicious; the circle must stand twice in a row


class PeerWait(Wait):
    """A wait for other ranks of one communicator. `blocked` is what the record says while it lasts."""

    __slots__ = (
        "_describe",
        "blocked",
        "comm",
        "marked",
        "next_circle",
        "next_look",
        "reported",
        "seen_circle",
        "started",
        "target",
    )

    def __init__(
        self, comm: Endpoint, describe: Callable[[], str], blocked: int = rec.NOT_BLOCKED, target: int = 0
    ) -> None:
        self.comm = comm
        self._describe = describe
        self.blocked = blocked
        self.target = target
        self.started = 0.0  # until the first check: most waits are over before
        self.marked = False
        self.reported = False

    @property
    def call(self) -> str:
        """The call that waits, in words."""
        return self._describe()

    def missing(self) -> list[int]:
        """The ranks that are still waited for."""
        raise NotImplementedError

    def describe(self) -> str:
        return f"{self._awaited()} in {self.call}"

    def limit(self) -> tuple[float, str]:
        """How many seconds the wait may take, and which setting says so."""
        return self.comm.config.exec_timeout_s, "exec_timeout_s, HCCL_EXEC_TIMEOUT"

    def _awaited(self) -> str:
        return ", ".join(map(self.comm.who, self.missing())) or "nobody any more"

    def finish(self) -> None:
        """Take back what the record says about being blocked. Called by the task when it goes on."""
        if self.marked:
            self.marked = False
            self.comm.mark_blocked(rec.NOT_BLOCKED, 0)
        if self.reported:
            self.comm.report("waits for", "nothing any more")

    def check(self) -> None:
        comm = self.comm
        if comm.aborted is not None:
            raise comm.aborted
        if not self.marked and self.blocked:
            self.marked = True
            comm.mark_blocked(self.blocked, self.target)
        missing = self.missing()
        for peer in range(comm.size):
            self._hear_last_words(peer, peer in missing)
        now = time.monotonic()
        if not self.started:
            self.started = now
            self.next_look = now + _LOOK_S
            self.next_circle = now + _CIRCLE_S
            self.seen_circle: list[int] = []
        if not self.reported and now - self.started > _REPORT_S:
            self.reported = True
            comm.report("waits for", self.describe())
        if now < self.next_look:
            return
        self.next_look = now + _LOOK_S
        for peer in missing:
            gone = comm.link(peer).gone()
            if gone is not None and peer in self.missing():
                self._hear_last_words(peer, True)
                self._raise_gone(peer, gone)
        if self.blocked and now >= self.next_circle:
            self.next_circle = now + _CIRCLE_S / 2
            self._look_for_circle()
        limit_s, name = self.limit()
        if now - self.started > limit_s:
            raise TimeoutError(f"{comm.me}: waited {limit_s:g} s ({name}) for {self.describe()}")

    def _hear_last_words(self, peer: int, missing: bool) -> None:
        record = self.comm.known_record(peer)
        if record is None or peer == self.comm.rank:
            return
        state = record.q[rec.STATE]
        if state in (rec.FAILED, rec.DISAGREED):
            words = record.last_words  # "@…" repeats what that rank heard from another: the first cause is what counts
            origin = words[1:] if words.startswith("@") else f"rank {peer} failed: {words}"
            kind = BrokenError if state == rec.FAILED else DisagreementError
            raise kind(f"{self.comm.me}: {self.call} was given up because {origin}", origin=origin)
        if state == rec.CLOSED and missing and peer in self.missing():
            origin = f"rank {peer} {record.last_words}"
            raise BrokenError(
                f"{self.comm.me}: {self.call} waits for rank {peer}, which {record.last_words}", origin=origin
            )

    def _raise_gone(self, peer: int, gone: str) -> NoReturn:
        member = self.comm.link(peer).member
        who = f"rank {peer} (pid {member.pid})"
        raise BrokenError(f"{self.comm.me}: {self.call} waits for {who}, but {gone}", origin=f"{who} is dead: {gone}")

    def _look_for_circle(self) -> None:
        circle = find_circle(self.comm)
        if circle and circle == self.seen_circle:
            calls = "; ".join(f"rank {r} waits for rank {s} in {self.comm.call_of(r, s)}" for r, s in _edges(circle))
            messages = all(self.comm.words(r)[rec.BLOCKED] == rec.IN_P2P for r in circle)
            remedy = "; a send is over when it is received: use batch_send_recv or group()" if messages else ""
            raise DisagreementError(f"{self.comm.me}: deadlock, no rank of this circle can go on: {calls}{remedy}")
        self.seen_circle = circle


def _edges(circle: list[int]) -> list[tuple[int, int]]:
    return [(rank, circle[(i + 1) % len(circle)]) for i, rank in enumerate(circle)]


def awaited(comm: Endpoint, rank: int) -> list[int]:
    """Whom `rank` is blocked on according to the records; empty when it is not blocked or that cannot be known."""
    record = comm.known_record(rank)
    if record is None or record.q[rec.STATE] != rec.ALIVE:
        return []
    kind = record.q[rec.BLOCKED]
    others = [(p, r) for p in range(comm.size) if p != rank and (r := comm.known_record(p)) is not None]
    if kind == rec.IN_COLLECTIVE:
        target = record.q[rec.BLOCKED_TARGET]
        return [p for p, r in others if r.q[rec.PROGRESS] < target]
    if kind == rec.IN_P2P:
        missing = []
        lines = 0  # that are not served; a rank that waited for more of them can go on, it only did not run yet
        for p, r in others:
            mine, theirs = rec.PEERS + rec.PEER_WORDS * p, rec.PEERS + rec.PEER_WORDS * rank
            receives = record.q[mine + rec.INCOMING + rec.L_POSTED] > r.q[theirs + rec.L_POSTED]
            sends = record.q[mine + rec.L_POSTED] > r.q[theirs + rec.INCOMING + rec.L_DONE]
            lines += receives + sends
            if receives or (sends and r.q[theirs + rec.INCOMING + rec.L_POSTED] < record.q[mine + rec.L_POSTED]):
                missing.append(p)
        return missing if lines >= record.q[rec.BLOCKED_TARGET] else []
    return []


def find_circle(comm: Endpoint) -> list[int]:
    """Find ranks that wait for each other in a circle, smallest rank first; empty when there is none.

    Every rank waits for all that it awaits, and the calls of one communicator are in order on each rank, so a circle
    never dissolves by itself.
    """
    for peer in comm.peers:
        comm.find_record(peer)  # messages are sent without knowing the ranks in between
    graph = {rank: awaited(comm, rank) for rank in range(comm.size)}
    state: dict[int, int] = {}
    for start in graph:
        path: list[int] = []
        found = _walk(graph, start, path, state)
        if found:
            smallest = found.index(min(found))
            return found[smallest:] + found[:smallest]
    return []


def _walk(graph: dict[int, list[int]], node: int, path: list[int], state: dict[int, int]) -> list[int]:
    if state.get(node) == 2:
        return []
    if node in path:
        return path[path.index(node) :]
    path.append(node)
    for peer in graph[node]:
        found = _walk(graph, peer, path, state)
        if found:
            return found
    path.pop()
    state[node] = 2
    return []


class ProgressWait(PeerWait):
    """Wait until each of `peers` has reached its target of collective progress."""

    __slots__ = ("_first", "_words", "peers", "targets")

    def __init__(self, comm: Endpoint, describe: Callable[[], str], peers: list[int], targets: list[int]) -> None:
        # Only who waits for others to enter can be part of a circle: once all are in, all get out by themselves. Whom
        # they wait for then is not in the progress words: looking for circles would find some that are not there.
        entering = min(targets) == comm.progress + 1
        super().__init__(comm, describe, rec.IN_COLLECTIVE if entering else rec.NOT_BLOCKED, min(targets))
        self.peers = peers
        self.targets = targets
        self._words = [comm.words(peer) for peer in peers]
        self._first = 0

    def ready(self) -> bool:
        if self.comm.poll is not None:
            self.comm.poll()
        first, words, targets = self._first, self._words, self.targets
        while first < len(words):
            if words[first][0] < targets[first]:
                self._first = first
                return False
            first += 1
        self._first = first
        return True

    def missing(self) -> list[int]:
        return [p for p, w, t in zip(self.peers, self._words, self.targets, strict=True) if w[0] < t]

    def sleep(self, timeout_s: float) -> None:
        first = self._first
        if first < len(self.peers):
            self.comm.sleep_on(self.peers[first], rec.PROGRESS, rec.SLEEPER, self.targets[first], timeout_s)


class RecordWait(PeerWait):
    """Wait until each of `peers` has opened this communicator (the links are made at the first call, as HCCL does)."""

    __slots__ = ("peers",)

    def __init__(self, comm: Endpoint, describe: Callable[[], str], peers: list[int]) -> None:
        super().__init__(comm, describe)
        self.peers = peers

    def ready(self) -> bool:
        if self.comm.poll is not None:
            self.comm.poll()
        return all(self.comm.find_record(peer) is not None for peer in self.peers)

    def missing(self) -> list[int]:
        return [p for p in self.peers if self.comm.known_record(p) is None]

    def describe(self) -> str:
        return (
            f"{self._awaited()} to open {self.comm.name!r} (do all members give sub or split the same?) for {self.call}"
        )

    def limit(self) -> tuple[float, str]:
        return self.comm.config.connect_timeout_s, "connect_timeout_s, HCCL_CONNECT_TIMEOUT"


class LineWait(PeerWait):
    """Wait for words of peers' send and receive lines: (peer, word, sleeper word, target) each; all must be reached."""

    __slots__ = ("any_of", "items")

    def __init__(
        self, comm: Endpoint, describe: Callable[[], str], items: list[tuple[int, int, int, int]], any_of: bool
    ) -> None:
        super().__init__(comm, describe, rec.IN_P2P, len(items) if any_of else 1)
        self.items = items
        self.any_of = any_of

    def _pending(self) -> list[tuple[int, int, int, int]]:
        return [item for item in self.items if self.comm.words(item[0])[item[1]] < item[3]]

    def ready(self) -> bool:
        if self.comm.poll is not None:
            self.comm.poll()
        pending = self._pending()
        return len(pending) < len(self.items) if self.any_of else not pending

    def missing(self) -> list[int]:
        return sorted({item[0] for item in self._pending()})

    def sleep(self, timeout_s: float) -> None:
        pending = self._pending()
        if len(pending) == len(self.items) or (pending and not self.any_of):
            peer, word, sleeper, target = pending[0]
            self.comm.sleep_on(peer, word, sleeper, target, timeout_s if len(pending) == 1 else timeout_s / 8)


class TransferWait(PeerWait):
    """Wait for a message to leave or arrive."""

    __slots__ = ("peer", "transfer")

    def __init__(self, comm: Endpoint, describe: Callable[[], str], peer: int, transfer: Transfer) -> None:
        super().__init__(comm, describe)
        self.peer = peer
        self.transfer = transfer

    def ready(self) -> bool:
        if self.comm.poll is not None:
            self.comm.poll()
        return self.transfer.done()

    def missing(self) -> list[int]:
        return [] if self.transfer.done() else [self.peer]

    def sleep(self, timeout_s: float) -> None:
        time.sleep(50e-6)  # messages have no futex


class TurnWait(Wait):
    """Wait for the calls of one communicator that were enqueued earlier, on whatever stream."""

    __slots__ = ("comm", "number")

    def __init__(self, comm: Endpoint, number: int) -> None:
        self.comm = comm
        self.number = number

    def ready(self) -> bool:
        return self.comm.turn >= self.number

    def describe(self) -> str:
        return f"earlier calls on {self.comm.name!r}"

    def check(self) -> None:
        if self.comm.aborted is not None:  # an earlier call failed on another stream: this one's turn never comes
            raise self.comm.aborted

    def sleep(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, 50e-6))
