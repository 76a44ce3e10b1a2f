"""What does a rank show and see of a communicator? Its record, the records of its peers, and the words between them.

This is the side of a communicator that tasks and waits work with: announcing calls, posting progress, sleeping on words
of peers, failing so that all hear of it. Nothing here checks arguments or knows an operation.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from device import Device, Stream
from device.wait import Futex, Patience
from hccl import record as rec
from hccl.config import Config
from hccl.errors import ArgumentError, BrokenError, ClosedError, DisagreementError, HcclError
from hccl.fabric import Fabric
from hccl.plan import Plan, Tally, describe_call
from hccl.record import C_ENTER, Record
from hccl.topology import Topology
from hccl.transport import Link

_FAREWELL_S = 5.0
_SMALL_SCRATCH = 2048


class Endpoint:
    """This rank's end of a communicator. Owns its record, its CCL buffer and its share of the links.

    Attributes:
        rank, size, name, device, topology, config: what they say; `device` is this rank's NPU.
        turn, seq, progress: calls finished, collectives entered, and how far this rank is with them.
        aborted: why it is of no further use, or None.
    """

    def __init__(
        self,
        fabric: Fabric,
        members: Sequence[int],
        rank: int,
        name: str,
        topology: Topology,
        config: Config,
        patience: Patience,
    ) -> None:
        self.rank = rank
        self.size = len(members)
        self.name = name
        self.device: Device = fabric.device
        self.topology = topology
        self.config = config
        self._fabric = fabric
        self._members = tuple(members)
        self.patience = patience
        self._state_text = ""
        self._tallies: dict[tuple[tuple[int, int], ...], Tally] = {}  # of collectives, by (peer, bytes) sent
        self._messages_sent: dict[int, int] = {}
        self._futexes: dict[tuple[int, int], Futex] = {}
        self._costs: dict[tuple[int, bool], tuple[float, float]] = {}
        self.tracing = self.device.timeline.enabled
        self.entered_wall_s = 0.0
        self.aborted: HcclError | None = None
        self.turn = 0
        self.seq = 0
        self.progress = 0
        self.linked = False
        self.peers = [p for p in range(self.size) if p != rank]
        self.peer_words: list[memoryview] = []
        self.peer_heads: list[list[tuple[int, memoryview, memoryview[float]]]] = [[], []]
        self.sent_numbers: dict[int, int] = {}
        self.received_numbers: dict[int, int] = {}
        try:
            self._key = fabric.open_name(name, self._members)
        except KeyError:
            raise ArgumentError(f"rank {rank}: a communicator named {name!r} exists already on this device") from None
        try:
            self._scratch = fabric.device.arena.malloc(2 * (config.buffer_bytes + _SMALL_SCRATCH), "scratch")
            self.record: Record = fabric.board.open(self._key, self.size)
        except BaseException:
            fabric.close_name(name)
            raise
        self._pid = os.getpid()
        self.own = self.record.q
        self._records: list[Record | None] = [None] * self.size
        self._records[rank] = self.record
        self._message_links = [self.link(p) for p in self.peers if not self.link(p).direct]
        self.poll: Callable[[], None] | None = self._message_links[0].poll if self._message_links else None
        self.record.q[rec.SCRATCH] = self._scratch.address
        self._announced: list[Plan | None] = [None, None]
        self._heads = [_head(self.record, 0), _head(self.record, 1)]
        self._progress_futex = self.record.futex(rec.PROGRESS)
        fabric.retain(self)

    @property
    def me(self) -> str:
        """How messages call this rank."""
        return f"rank {self.rank}"

    @property
    def closed(self) -> bool:
        """Whether `close` or `abort` has been called here."""
        return bool(self._state_text)

    def who(self, peer: int) -> str:
        """How messages call a rank: with its rank in the world where the two differ."""
        member = self._members[peer]
        return f"rank {peer}" if member == peer else f"rank {peer} (rank {member} of the world)"

    @property
    def domains(self) -> list[int]:
        """For each rank, a number that those who share memory have in common."""
        return [self._fabric.domains[m] for m in self._members]

    def link(self, peer: int) -> Link:
        """The link to rank `peer` of this communicator."""
        return self._fabric.links[self._members[peer]]

    def find_record(self, peer: int) -> Record | None:
        """The record of `peer`, looked for when it is not known yet."""
        record = self._records[peer]
        if record is None:
            record = self._records[peer] = self.link(peer).find_record(self._key, self.size)
        return record

    def known_record(self, peer: int) -> Record | None:
        """The record of `peer` if it was found before."""
        return self._records[peer]

    def words(self, peer: int) -> memoryview:
        """The record of `peer` as integers."""
        record = self._records[peer]
        assert record is not None
        return record.q

    def link_all(self) -> None:
        """Prepare for collectives once all records are known."""
        for peer in self.peers:
            record = self._records[peer]
            assert record is not None
            self.peer_words.append(record.q)
            for bank in (0, 1):
                self.peer_heads[bank].append((peer, *_head(record, bank)))
        self.linked = True

    def head_of(self, rank: int, bank: int) -> memoryview:
        """The call header of `rank`."""
        record = self._records[rank]
        assert record is not None
        return _head(record, bank)[0]

    def buffers_of(self, rank: int, bank: int) -> memoryview:
        """Where the buffers of the call of `rank` are."""
        start = rec.BUFFERS + rec.BUFFERS_WORDS * bank
        return self.words(rank)[start : start + rec.BUFFERS_WORDS]

    def scratch_of(self, rank: int, bank: int, nbytes: int) -> int:
        """Address of the part of the CCL buffer of `rank` that calls of this bank with so much scratch use.

        The two parts for small calls lie on one page: when ranks take turns on a core, pages are what is short.
        """
        start = self.words(rank)[rec.SCRATCH]
        if nbytes <= _SMALL_SCRATCH:
            return start + bank * _SMALL_SCRATCH
        return start + _SMALL_SCRATCH * 2 + bank * self.config.buffer_bytes

    def view(self, rank: int, address: int, nbytes: int) -> NDArray[np.uint8] | None:
        """Memory of `rank` in place."""
        return self.link(rank).view(address, nbytes)

    def announce(self, plan: Plan, bank: int, enter_s: float, progress: int) -> None:
        """Write the header of a call and say that this rank has entered it."""
        head, times = self._heads[bank]
        times[C_ENTER] = enter_s
        if self._announced[bank] is not plan:
            self._announced[bank] = plan
            head[rec.C_CALL : rec.C_ENTER] = plan.header
            head[rec.C_PLAN] = plan.serial  # stands for the addresses
            where = self.buffers_of(self.rank, bank)
            where[rec.B_IN], where[rec.B_OUT] = plan.buffers
            where[rec.B_SCRATCH] = plan.scratch or 0
        if self._message_links:
            self.buffers_of(self.rank, bank)[rec.B_TAG] = self._fabric.next_tag()
            self._publish(rec.BUFFERS + rec.BUFFERS_WORDS * bank, rec.B_TAG + 1)
            self._publish(rec.CALL + rec.CALL_WORDS * bank, rec.CALL_WORDS)
        self.post(progress)

    def post(self, progress: int) -> None:
        """Tell the peers how far this rank is with its collectives."""
        own = self.own
        own[0] = progress
        if own[1]:
            own[1] = 0
            self._progress_futex.wake()
        if self._message_links:
            self._publish(rec.PROGRESS, 1)

    def post_line(self, peer: int, word: int, sleeper: int, value: int, *, first: int, count: int) -> None:
        """Set a word of the line for `peer`, wake whoever sleeps on it, publish words [first, first + count)."""
        q = self.record.q
        q[word] = value
        if q[sleeper]:
            q[sleeper] = 0
            self._futex(self.rank, word).wake()
        link = self.link(peer)
        if not link.direct:
            link.publish(self.record, self._key, first, count)

    def sleep_on(self, peer: int, word: int, sleeper: int, target: int, timeout_s: float) -> None:
        """Sleep until word `word` of the record of `peer` changes, or for `timeout_s`."""
        q = self.words(peer)
        futex = self._futex(peer, word)
        q[sleeper] = 1
        value = q[word]
        if value < target:
            futex.wait(value, min(timeout_s, 50e-6) if self._message_links else timeout_s)

    def report(self, kind: str, text: str) -> None:
        """Tell the launcher, if there is one, what this rank does; it shows that when the run fails or hangs."""
        reporter = self._fabric.reporter
        if reporter is not None:
            with contextlib.suppress(RuntimeError):  # a launcher that has gone needs no report
                reporter(kind, f"{text} on {self.name!r}")

    def mark_blocked(self, kind: int, target: int) -> None:
        """Say in the record what kind of call this rank is stuck in."""
        if kind == rec.IN_P2P:  # lines travel to their partner only: a circle over servers is seen by who knows all
            self._publish(rec.PEERS, rec.PEER_WORDS * self.size)
        self.record.q[rec.BLOCKED_SEQ] = self.seq
        self.record.q[rec.BLOCKED_TARGET] = target
        self.record.q[rec.BLOCKED] = kind
        self._publish(rec.BLOCKED, 3)

    def call_of(self, rank: int, peer: int) -> str:
        """Describe, from the records, the call in which `rank` waits for `peer`."""
        q = self.words(rank)
        if q[rec.BLOCKED] == rec.IN_COLLECTIVE:
            seq = q[rec.BLOCKED_SEQ]
            head = self.head_of(rank, seq & 1)
            return f"{describe_call(head[rec.C_CALL], head[rec.C_COUNT])}, its collective #{seq}"
        line = rec.PEERS + rec.PEER_WORDS * peer
        theirs = rec.PEERS + rec.PEER_WORDS * rank
        if q[line + rec.L_POSTED] > self.words(peer)[theirs + rec.INCOMING + rec.L_DONE]:
            return describe_call(q[line + rec.L_CALL], q[line + rec.L_COUNT])
        line += rec.INCOMING
        return describe_call(q[line + rec.L_CALL], q[line + rec.L_COUNT])

    def fail(self, error: BaseException) -> None:
        """Make the communicator unusable because of `error` and tell the peers."""
        if self.aborted is None and not self._state_text:
            self.aborted = error if isinstance(error, HcclError) else BrokenError(f"{self.me}: {error}")
            origin = getattr(error, "origin", None)
            state = rec.DISAGREED if isinstance(error, DisagreementError) else rec.FAILED
            self._say_last_words(state, f"@{origin}" if origin else str(error) or type(error).__name__)

    def _say_last_words(self, state: int, text: str) -> None:
        """Tell the peers that this rank is out of it, and take back calls that they have not entered yet.

        Who enters later must not use buffers that may be gone. Only where calls differ they stay: peers print them.
        """
        self.record.say_last_words(state, text)
        self._publish(rec.STATE, rec.TEXT + self.record.q[rec.TEXT_BYTES] // 8 - rec.STATE)
        if state == rec.FAILED and self.record.q[rec.STATE] != rec.DISAGREED:
            for bank, (head, _) in enumerate(self._heads):
                head[rec.C_CALL] = head[rec.C_PLAN] = 0
                self._publish(rec.CALL + rec.CALL_WORDS * bank, rec.CALL_WORDS)
        self._progress_futex.wake()

    def count_sent(self, peer: int, nbytes: int) -> None:
        """Add to the byte counters."""
        self._messages_sent[peer] = self._messages_sent.get(peer, 0) + nbytes

    def link_cost(self, peer: int, sends: bool) -> tuple[float, float]:
        """α and β of a message to or from `peer`."""
        cost = self._costs.get((peer, sends))
        if cost is None:
            pair = (self.rank, peer) if sends else (peer, self.rank)
            cost = self._costs[peer, sends] = (float(self.topology.alpha(*pair)), float(self.topology.beta(*pair)))
        return cost

    def look_at_clock(self) -> None:
        """Note when a call begins in wall time."""
        self.entered_wall_s = time.perf_counter()

    def draw(self, stream: Stream, name: str, enter_s: float, latest_s: float, exit_s: float) -> None:
        """Put a finished call on the timeline: waiting for the last rank, then the operation."""
        timeline = self.device.timeline
        if latest_s > enter_s:
            timeline.add(stream, f"wait: {name}", "wait", enter_s, latest_s)
        timeline.add(stream, name, "communication", latest_s, exit_s, self.entered_wall_s, time.perf_counter())

    def _futex(self, peer: int, word: int) -> Futex:
        futex = self._futexes.get((peer, word))
        if futex is None:
            record = self._records[peer]
            assert record is not None
            futex = self._futexes[peer, word] = record.futex(word)
        return futex

    def _publish(self, first: int, count: int) -> None:
        for link in self._message_links:
            link.publish(self.record, self._key, first, count)

    def see_peers_out(self) -> None:
        """Wait until nobody reads this rank's scratch: peers may still be in a call that this rank has left."""
        end = time.monotonic() + _FAREWELL_S
        for peer in self.peers:
            record = self._records[peer]
            if record is None or not self.link(peer).direct:
                continue
            pause_s = 10e-6
            while (
                record.q[rec.COMPLETED] < self.seq and record.q[rec.STATE] == rec.ALIVE and self._stands(peer, record)
            ):
                if time.monotonic() > end or self.link(peer).gone() is not None:
                    break
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 2e-3)

    def _stands(self, peer: int, record: Record) -> bool:
        """Tell whether `record` still is this communicator's: its owner may have closed it, and used it again."""
        now = self.link(peer).find_record(self._key, self.size)
        return now is not None and now.offset == record.offset

    def leave(self, state: int, text: str, in_haste: bool = False) -> None:
        """Say the last words and let go of everything; `state` is CLOSED or FAILED.

        in_haste: do not let the device wait for what is queued. A failed communicator never does.
        """
        if os.getpid() != self._pid:
            return  # a forked child: record, memory and links are the parent's, who goes on with them
        self._state_text = "closed" if state == rec.CLOSED else "aborted"
        if self.aborted is None:
            self.aborted = ClosedError(f"{self.me}: {self.name!r} is {self._state_text} here")
        self._say_last_words(state, text)
        self._fabric.board.close(self._key, self.size)
        self._fabric.close_name(self.name)
        if self._scratch.live:
            self.device.arena.free(self._scratch)
        self._fabric.release(failed=in_haste or state == rec.FAILED)


def _head(record: Record, bank: int) -> tuple[memoryview, memoryview[float]]:
    start = rec.CALL + rec.CALL_WORDS * bank
    return record.q[start : start + rec.CALL_WORDS], record.d[start : start + rec.CALL_WORDS]
