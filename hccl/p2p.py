"""How do two ranks exchange a message? Send, recv and batches of them, each item on its own.

The sender says in its line what it has, the receiver says in its line what it wants; whoever sees both compares. The
receiver copies out of the sender's memory (or takes the message) and says done; a send completes only then, as HCCL's
rendezvous does. Items of a batch progress independently of their order in the list; items of one direction between the
same two ranks go in order. Items to oneself are paired in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from device.stream import Stream
from device.wait import Wait, fence
from hccl import record as rec
from hccl.errors import ArgumentError, DisagreementError
from hccl.plan import describe_call
from hccl.types import OpCode
from hccl.waiting import LineWait, RecordWait, TransferWait, TurnWait

if TYPE_CHECKING:
    from hccl.endpoint import Endpoint
    from hccl.transport import Transfer

TaskGenerator = Generator[Wait | None, None, None]


@dataclass(eq=False)
class Item:
    """One message of a batch. `word` packs operation and type, `data` is this rank's memory."""

    sends: bool
    peer: int
    word: int
    count: int
    address: int
    data: NDArray[np.uint8]
    number: int = 0  # of its line, from 1
    transfer: Transfer | None = None
    peer_enter_s: float = 0.0

    def describe(self) -> str:
        """Name it in messages."""
        text = describe_call(self.word, self.count)
        return f"{text} {'to' if self.sends else 'from'} rank {self.peer}"


def pair_own(items: Sequence[Item], me: str) -> list[tuple[Item, Item]]:
    """Pair the items that a rank sends to itself with those that it receives from itself, in order.

    Raises: ArgumentError when they do not match one to one.
    """
    sends = [i for i in items if i.sends]
    receives = [i for i in items if not i.sends]
    if len(sends) != len(receives):
        raise ArgumentError(
            f"{me}: {len(sends)} sends to itself, but {len(receives)} receives from itself in one batch"
        )
    for a, b in zip(sends, receives, strict=True):
        if (a.count, a.word >> 8) != (b.count, b.word >> 8):
            raise ArgumentError(f"{me}: {a.describe()} is received by itself as {b.describe()}")
    return list(zip(sends, receives, strict=True))


def batch(
    stream: Stream, turn: int, comm: Endpoint, items: list[Item], own: list[tuple[Item, Item]], keep: Any
) -> TaskGenerator:
    """Carry out the items as call number `turn` of `comm`. The task holds the buffers alive until it is done."""
    if comm.turn != turn:
        yield TurnWait(comm, turn)
    try:
        if comm.aborted is not None:
            raise comm.aborted
        for array in keep:
            if not array._alloc.live:
                raise array._alloc.dead("send or receive: freed while queued")
        yield from _link(comm, items)
        comm.look_at_clock()
        enter_s = stream.now_s
        for send, receive in own:
            np.copyto(receive.data, send.data)
        clock = [enter_s, enter_s]  # latest entry of a partner, exit
        lines: dict[tuple[bool, int], deque[Item]] = {}
        for item in items:
            lines.setdefault((item.sends, item.peer), deque()).append(item)
        for line in lines.values():
            _start(comm, line[0], enter_s)
        while lines:
            moved = False
            for key, line in list(lines.items()):
                item = line[0]
                finished = yield from _receive(comm, item) if not item.sends else _sent(comm, item)
                if finished:
                    moved = True
                    _keep_time(comm, item, enter_s, clock)
                    line.popleft()
                    if line:
                        _start(comm, line[0], enter_s)
                    else:
                        del lines[key]
            if not moved:
                heads = [line[0] for line in lines.values()]
                wait = LineWait(comm, partial(_describe, heads), [_awaited(comm, i) for i in heads], True)
                if not wait.ready():
                    yield wait
                    wait.finish()
        latest_s, exit_s = clock
        stream.now_s = exit_s
        stream.wait_s += latest_s - enter_s
        stream.comm_s += exit_s - latest_s
        if comm.tracing:
            name = items[0].describe() if len(items) == 1 else f"batch_send_recv of {len(items) + 2 * len(own)}"
            comm.draw(stream, name, enter_s, latest_s, exit_s)
    except Exception as error:
        comm.fail(error)
        raise
    comm.turn = turn + 1


def _link(comm: Endpoint, items: list[Item]) -> TaskGenerator:
    peers = sorted({item.peer for item in items})
    if any(comm.known_record(peer) is None for peer in peers):
        wait = RecordWait(comm, partial(_describe, items), peers)
        if not wait.ready():
            yield wait


def _describe(items: Sequence[Item]) -> str:
    more = f" and {len(items) - 4} more" if len(items) > 4 else ""
    return "; ".join(item.describe() for item in items[:4]) + more


def _line(peer: int, incoming: bool) -> int:
    return rec.PEERS + rec.PEER_WORDS * peer + (rec.INCOMING if incoming else 0)


def _start(comm: Endpoint, item: Item, enter_s: float) -> None:
    """Say in this rank's line what it has or wants."""
    numbers = comm.sent_numbers if item.sends else comm.received_numbers
    numbers[item.peer] = item.number = numbers.get(item.peer, 0) + 1
    line = _line(item.peer, not item.sends)
    q = comm.record.q
    q[line + rec.L_CALL] = item.word
    q[line + rec.L_COUNT] = item.count
    comm.record.d[line + rec.L_ENTER] = enter_s
    q[line + rec.L_ADDRESS] = item.address
    link = comm.link(item.peer)
    if item.sends and not link.direct:
        q[line + rec.L_TAG] = tag = comm._fabric.next_tag()
        item.transfer = link.send(item.data, tag)
    comm.post_line(item.peer, line + rec.L_POSTED, line + rec.L_SLEEPER, item.number, first=line, count=rec.L_TAG + 1)


def _awaited(comm: Endpoint, item: Item) -> tuple[int, int, int, int]:
    """The word of the peer's record that an item waits for: (peer, word, sleeper, target)."""
    line = _line(comm.rank, item.sends)
    if item.sends:
        return item.peer, line + rec.L_DONE, line + rec.L_DONE_SLEEPER, item.number
    return item.peer, line + rec.L_POSTED, line + rec.L_SLEEPER, item.number


def _receive(comm: Endpoint, item: Item) -> Generator[Wait | None, None, bool]:
    """Take the message if the sender has posted it; say done."""
    words = comm.words(item.peer)
    theirs, mine = _line(comm.rank, False), _line(item.peer, True)
    if words[theirs + rec.L_POSTED] < item.number:
        return False
    if fence is not None:
        fence()
    done = (mine + rec.L_DONE, mine + rec.L_DONE_SLEEPER, item.number)
    call, count = words[theirs + rec.L_CALL], words[theirs + rec.L_COUNT]
    if (call >> 8, count) != (item.word >> 8, item.count):
        comm.record.q[mine + rec.L_MISMATCH] = item.number
        comm.post_line(item.peer, *done, first=mine + rec.L_DONE, count=rec.L_MISMATCH - rec.L_DONE + 1)
        raise _mismatch(comm, item, call, count)
    nbytes = len(item.data)
    if nbytes:
        link = comm.link(item.peer)
        source = link.view(words[theirs + rec.L_ADDRESS], nbytes)
        if source is not None:
            np.copyto(item.data, source)
            if words[rec.STATE] == rec.FAILED:  # the sender may have freed or overwritten what was copied
                LineWait(comm, item.describe, [_awaited(comm, item)], False).check()
        else:
            transfer = link.receive(item.data, words[theirs + rec.L_TAG])
            if not transfer.done():
                yield TransferWait(comm, item.describe, item.peer, transfer)
    # Both ends need the other's time of entry, and after "done" either may go on to its next message and overwrite it:
    # take the sender's before, and leave this rank's in a word that stands until the sender has said what comes next.
    item.peer_enter_s = comm.known_record(item.peer).d[theirs + rec.L_ENTER]  # type: ignore[union-attr]
    comm.record.d[mine + rec.L_ENTERED] = comm.record.d[mine + rec.L_ENTER]
    comm.post_line(item.peer, *done, first=mine + rec.L_DONE, count=rec.L_ENTERED - rec.L_DONE + 1)
    return True


def _sent(comm: Endpoint, item: Item) -> Generator[Wait | None, None, bool]:
    """Tell whether the receiver has taken the message."""
    words = comm.words(item.peer)
    theirs = _line(comm.rank, True)
    if words[theirs + rec.L_DONE] < item.number:
        return False
    if words[theirs + rec.L_MISMATCH] == item.number:
        raise _mismatch(comm, item, words[theirs + rec.L_CALL], words[theirs + rec.L_COUNT])
    if item.transfer is not None and not item.transfer.done():
        yield TransferWait(comm, item.describe, item.peer, item.transfer)
    item.peer_enter_s = comm.known_record(item.peer).d[theirs + rec.L_ENTERED]  # type: ignore[union-attr]
    comm.count_sent(item.peer, len(item.data))
    return True


def _mismatch(comm: Endpoint, item: Item, call: int, count: int) -> DisagreementError:
    """The error of both ends of a message whose ends do not match."""
    theirs = f"{describe_call(call, count)} {'from' if item.sends else 'to'} rank {comm.rank}"
    return DisagreementError(f"{comm.me} called {item.describe()}, but rank {item.peer} called {theirs}")


def _keep_time(comm: Endpoint, item: Item, enter_s: float, clock: list[float]) -> None:
    """Both ends leave at the later entry + α + bytes·β, as `simulate` says of a one-row schedule."""
    start_s = max(enter_s, item.peer_enter_s)
    alpha_s, beta_s = comm.link_cost(item.peer, item.sends)
    clock[0] = max(clock[0], start_s)
    clock[1] = max(clock[1], start_s + (alpha_s + len(item.data) * beta_s))


def word_of(sends: bool, hccl_type: int) -> int:
    """Pack operation and element type of a message."""
    return (OpCode.SEND if sends else OpCode.RECV) | hccl_type << 8 | 15 << 16
