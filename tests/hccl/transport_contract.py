"""The contract of a link, as a program: two sides go through every clause over one transport and say what failed.

    python transport_contract.py local|shm        mpirun -n 2 python transport_contract.py mpi

Each clause is one function that both sides run. The sides talk about the test itself through `Side.exchange`, which
is not a link. The last line of the output is a JSON object: clause -> "" or what went wrong.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import select
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from device import Device
from device.wait import fence
from hccl.config import Config
from hccl.record import ALIVE, BUFFERS, CLOSED, PROGRESS, STATE, TEXT, TEXT_CAPACITY, Board, key_of
from hccl.transport import Link, Transfer
from hccl.transport.local import LocalLink, Presence
from hccl.world import introduce

SIZES = (0, 1, 7, 4096, (1 << 20) + 3)
LIMIT_S = 30.0  # of a wait that hangs; nothing measures time


class Side:
    """One of two ranks: its device and board, its link to the other, and a way to talk about the test."""

    def __init__(self, rank: int, exchange: Callable[[Any], Any], connect: Callable[[Side, Any], Link]) -> None:
        self.rank = rank
        self._exchange = exchange
        self._clause = "start"
        self.device = Device(rank, ordinal=rank)
        self.board = Board.create(f"contract-{rank}")
        self.presence = Presence()
        self.member = introduce(self.device, self.board, rank, 2, Config())
        self.link = connect(self, self.member)

    def exchange(self, data: Any = None) -> Any:
        """Wait for the other side; give it `data`, get its."""
        clause, theirs = self._exchange((self._clause, data))
        assert clause == self._clause, f"the other side is at {clause!r}: {theirs}"
        return theirs

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll the link until `condition()`."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            self.link.poll()
            assert time.monotonic() < end, "it did not come true"
            os.sched_yield()

    def finish(self, *transfers: Transfer) -> None:
        self.until(lambda: all([t.done() for t in transfers]))

    def run(self, clause: Callable[[Side], None]) -> str:
        """Run a clause with the other side; return what failed on either."""
        self._clause = clause.__name__
        mine = ""
        try:
            clause(self)
        except Exception:
            mine = f"side {self.rank}: {traceback.format_exc()}"
        self._clause += " end"
        return mine + self.exchange(mine)


# -------------------------------------------------------------------------------------------------------------- clauses
def a_record_is_found_once_its_owner_has_opened_it(side: Side) -> None:
    key = key_of("late")
    before = side.link.find_record(key, 2)
    # A shadow may be there before, but there is nothing in it.
    assert before is None if side.link.direct else not any(before.q)
    side.exchange()
    mine = side.board.open(key, 2)
    mine.q[PROGRESS] = 5 + side.rank
    side.link.publish(mine, key, PROGRESS, 1)
    side.exchange()
    theirs = side.link.find_record(key, 2)
    side.until(lambda: theirs.q[PROGRESS] == 5 + (1 - side.rank))
    assert side.link.find_record(key_of("never"), 2) is None or not side.link.direct


def a_name_that_is_taken_is_refused(side: Side) -> None:
    key = key_of("taken")
    mine = side.board.open(key, 2)
    refuses(KeyError, side.board.open, key, 2)
    mine.say_last_words(CLOSED, "closed")
    side.board.close(key, 2)
    assert side.board.open(key, 2).q[STATE] == ALIVE


def what_was_published_before_a_record_is_looked_for_is_there(side: Side) -> None:
    key = key_of("early")
    mine = side.board.open(key, 2)
    mine.q[PROGRESS] = 77
    side.link.publish(mine, key, PROGRESS, 1)
    side.exchange()
    side.link.poll()
    theirs = side.link.find_record(key, 2)
    side.until(lambda: theirs.q[PROGRESS] == 77)


def words_arrive_in_the_order_of_publishing(side: Side) -> None:
    """Whoever has seen the flag sees the words that were written before it."""
    key, words, last = key_of("order"), 8, 400
    mine = side.board.open(key, 2)
    theirs = find(side, key)
    if side.rank == 0:
        for number in range(1, last + 1):
            for word in range(BUFFERS, BUFFERS + words):
                mine.q[word] = number
            side.link.publish(mine, key, BUFFERS, words)
            mine.q[PROGRESS] = number
            side.link.publish(mine, key, PROGRESS, 1)
    else:
        seen = 0
        while seen < last:
            side.until(lambda seen=seen: theirs.q[PROGRESS] > seen)
            seen = theirs.q[PROGRESS]
            if fence is not None:
                fence()
            found = [theirs.q[word] for word in range(BUFFERS, BUFFERS + words)]
            assert min(found) >= seen, (seen, found)
    side.exchange()


def data_of_every_size_arrives(side: Side) -> None:
    for size in SIZES:
        sent, got = pattern(size, side.rank), pattern(size, 1 - side.rank)
        x = side.device.array(sent) if size else side.device.empty(0, "uint8")
        address = side.exchange(x.address)
        if side.link.direct:
            assert np.array_equal(side.link.view(address, size), got), size
            side.exchange()
            side.link.view(address, size)[...] = 255 - got  # and the peer sees what is written
            side.exchange()
            assert np.array_equal(x.numpy(), 255 - sent), size
        else:
            assert side.link.view(address, size) is None
            target = np.zeros(size, np.uint8)
            side.finish(side.link.send(x.numpy(), 100), side.link.receive(target, 100))
            assert np.array_equal(target, got), size
        side.exchange()


def transfers_of_one_tag_keep_their_order_and_tags_do_not_mix(side: Side) -> None:
    if side.link.direct:
        for use in (side.link.send, side.link.receive):
            refuses(TypeError, use, np.zeros(1, np.uint8), 5)
        return
    first, second, other = (np.full(3, n, np.uint8) for n in (1, 2, 3))
    sends = [side.link.send(first, 7), side.link.send(second, 7), side.link.send(other, 8)]
    targets = [np.zeros(3, np.uint8) for _ in range(3)]
    tags = (8, 7, 7)
    side.finish(*sends, *(side.link.receive(t, tag) for t, tag in zip(targets, tags, strict=True)))
    assert [t[0] for t in targets] == [3, 1, 2]


def last_words_are_heard_after_the_record_is_closed(side: Side) -> None:
    known, late = key_of("closing"), key_of("closing early")
    mine = [side.board.open(key, 2) for key in (known, late)]
    theirs = find(side, known)
    for key, record in zip((known, late), mine, strict=True):
        record.say_last_words(CLOSED, f"closed on side {side.rank}")
        side.link.publish(record, key, STATE, TEXT + TEXT_CAPACITY // 8 - STATE)
        side.board.close(key, 2)
    side.exchange()
    for record in (theirs, side.link.find_record(late, 2)):
        side.until(lambda record=record: record.q[STATE] == CLOSED)
        assert record.last_words == f"closed on side {1 - side.rank}"


def a_peer_that_lives_is_not_gone(side: Side) -> None:
    assert side.link.gone() is None
    side.exchange()


CLAUSES = (
    a_record_is_found_once_its_owner_has_opened_it,
    a_name_that_is_taken_is_refused,
    what_was_published_before_a_record_is_looked_for_is_there,
    words_arrive_in_the_order_of_publishing,
    data_of_every_size_arrives,
    transfers_of_one_tag_keep_their_order_and_tags_do_not_mix,
    last_words_are_heard_after_the_record_is_closed,
    a_peer_that_lives_is_not_gone,
)


def find(side: Side, key: int) -> Any:
    side.exchange()
    record = side.link.find_record(key, 2)
    assert record is not None
    side.exchange()
    return record


def refuses(error: type[Exception], function: Callable[..., Any], *args: Any) -> None:
    try:
        function(*args)
    except error:
        return
    raise AssertionError(f"{function} took {args}")


def pattern(size: int, rank: int) -> np.ndarray:
    return ((np.arange(size) * 7 + 13 * rank) % 251).astype(np.uint8)


# ----------------------------------------------------------------------------------------------------------- transports
def through(side: Side, end: Callable[[], None]) -> None:
    """Go through all clauses; then side 1 ends by `end()`, and side 0 must see that and print everything."""
    results = {clause.__name__: side.run(clause) for clause in CLAUSES}
    if side.rank == 1:
        return end()
    for name, check in (("a_peer_that_has_ended_is_gone", gone), ("close_may_be_repeated", close_twice)):
        try:
            check(side)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results), flush=True)


def gone(side: Side) -> None:
    side.until(lambda: side.link.gone() is not None)
    assert "ended" in side.link.gone()


def close_twice(side: Side) -> None:
    side.link.close()
    side.link.close()


def local() -> None:
    ways = [queue.Queue(), queue.Queue()]

    def work(rank: int) -> None:
        def exchange(data: Any) -> Any:
            ways[1 - rank].put(data)
            return ways[rank].get(timeout=LIMIT_S)

        def connect(side: Side, member: Any) -> Link:
            theirs, device, board, presence = exchange((member, side.device, side.board, side.presence))
            return LocalLink(theirs, device, board, presence)

        side = Side(rank, exchange, connect)
        through(side, lambda: setattr(side.presence, "left", "its thread has ended"))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def shm_side(rank: int, pipe: Any) -> None:
    from hccl.transport.shm import ShmLink

    def exchange(data: Any) -> Any:
        pipe.send(data)
        assert pipe.poll(LIMIT_S), "the other side does not answer"
        return pipe.recv()

    side = Side(rank, exchange, lambda side, member: ShmLink(exchange(member)))
    through(side, lambda: os._exit(0))


def shm() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=shm_side, args=(1, there))
    child.start()
    shm_side(0, here)
    child.join()


def mpi() -> None:
    """Keep a parent between mpirun and each side, so that a side may end without taking the job with it."""
    if "--side" not in sys.argv:
        command = [sys.executable, *sys.argv, "--side"]
        if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
            sys.exit(subprocess.run(command).returncode)
        other = int(subprocess.run(command, capture_output=True, text=True).stdout)
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(other)], [], [])
        return
    import mpi4py

    mpi4py.rc.thread_level = "multiple"
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    from hccl.transport.mpi import MpiEngine, MpiLink

    world = MPI.COMM_WORLD
    rank = world.rank

    def exchange(data: Any) -> Any:
        return world.sendrecv(data, 1 - rank, source=1 - rank)

    def end() -> None:
        print(side.link.member.pid, flush=True)
        os._exit(0)

    engine = MpiEngine()
    side = Side(rank, exchange, lambda side, member: MpiLink(exchange(member), engine, same_host=True))
    through(side, end)
    os._exit(0)


if __name__ == "__main__":
    {"local": local, "shm": shm, "mpi": mpi}[sys.argv[1]]()
