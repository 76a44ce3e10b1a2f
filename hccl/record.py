"""What do ranks tell each other? One record per rank and communicator, in memory that its peers can read.

A rank writes only its own record; peers poll it. That is the whole protocol: there are no messages between ranks of one
host, and between hosts the same lines travel as messages into a shadow copy. All words are 64 bit, in units of which
the offsets below count. A line that peers poll has its own 128 bytes, so that polling does not slow the neighbours
down.

    0     progress of collectives; 1: somebody sleeps on the word before me
    4     what is called, element count, virtual entry time, plan: two banks of 4 words used in turn
    16    state, length of the last words, what this rank is blocked in, its scratch (CCL) buffer, collectives left
    32    in, out and scratch addresses and message tag of the call: two banks of 16 words
    64    last words: the text of the error that this rank failed with (1 KiB of UTF-8)
    192   for each peer: a line for what is sent to it (16 words), a line for what is received from it (16 words)

Two banks are enough: nobody leaves operation n before all have entered it, so when a rank writes the header of
n + 2 every peer has left n.
"""

from __future__ import annotations

import hashlib
from collections import deque

import numpy as np

from device.memory import Segment
from device.wait import Futex

PROGRESS, SLEEPER = 0, 1
STATE, TEXT_BYTES, BLOCKED, BLOCKED_TARGET, BLOCKED_SEQ, SCRATCH, COMPLETED = 16, 17, 18, 19, 20, 21, 22
CALL, CALL_WORDS = 4, 4
BUFFERS, BUFFERS_WORDS = 32, 16
TEXT, TEXT_CAPACITY = 64, 1024
PEERS, PEER_WORDS, INCOMING = 192, 32, 16

# words of a call header: what is compared, and where the buffers are
C_CALL, C_COUNT, C_ENTER, C_PLAN = range(4)
B_IN, B_OUT, B_SCRATCH, B_TAG = range(4)
# words of a send or receive line; those from DONE on exist in receive lines only
L_POSTED, L_SLEEPER, L_CALL, L_COUNT, L_ENTER, L_ADDRESS, L_TAG = range(7)
L_DONE, L_DONE_SLEEPER, L_MISMATCH, L_ENTERED = range(8, 12)

ALIVE, CLOSED, FAILED, DISAGREED = range(4)
NOT_BLOCKED, IN_COLLECTIVE, IN_P2P = 0, 1, 2

_MAGIC = 0x4843434C_424F4152  # "HCCLBOAR"
_DIRECTORY, _DIRECTORY_ENTRIES = 16, 4000
_FIRST_RECORD = 65536  # bytes
_KEPT_AFTER_CLOSE = 64  # closed records that stay readable for slow peers before their memory is used again
BOARD_BYTES = 256 << 20  # sparse: only records that exist take memory


def key_of(name: str) -> int:
    """Turn a communicator's name into the positive 63-bit key that its members look each other up by."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1 | 1


def record_bytes(ranks: int) -> int:
    """Size of a record of a communicator with `ranks` members, rounded to 4 KiB."""
    return -(-(PEERS + PEER_WORDS * ranks) * 8 // 4096) * 4096


class Record:
    """One rank's lines for one communicator: `q` sees the words as integers, `d` as doubles."""

    __slots__ = ("address", "d", "nbytes", "offset", "q")

    def __init__(self, memory: memoryview, address: int, offset: int) -> None:
        self.q = memory.cast("q")
        self.d = memory.cast("d")
        self.address = address
        self.offset = offset
        self.nbytes = memory.nbytes

    def futex(self, word: int) -> Futex:
        """A futex on word `word` of this record."""
        return Futex(self.address + 8 * word)

    def clear(self) -> None:
        """Forget everything."""
        self.q[:] = memoryview(bytes(self.nbytes)).cast("q")

    def say_last_words(self, state: int, text: str) -> None:
        """Publish that this rank failed or left, and why. The first words stand."""
        if self.q[STATE] != ALIVE:
            return
        data = text.encode()[:TEXT_CAPACITY]
        data += bytes(-len(data) % 8)
        if data:
            words = memoryview(data).cast("q")
            self.q[TEXT : TEXT + len(words)] = words
        self.q[TEXT_BYTES] = len(data)
        self.q[STATE] = state

    @property
    def last_words(self) -> str:
        """The text that came with a state other than ALIVE."""
        words = self.q[TEXT : TEXT + self.q[TEXT_BYTES] // 8]
        return words.tobytes().rstrip(b"\0").decode(errors="replace")


class Board:
    """The records of one rank, found by key. The owner opens and closes records, peers only look."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._bytes = segment.buffer
        self._words = segment.buffer.cast("q")
        self._address = int(np.frombuffer(segment.buffer, np.uint8, 1).ctypes.data)
        self._end = _FIRST_RECORD
        self._closed: deque[tuple[int, int]] = deque()

    @classmethod
    def create(cls, name: str) -> Board:
        """Make this rank's board."""
        board = cls(Segment.create(BOARD_BYTES, name))
        board._words[0] = _MAGIC
        return board

    def open(self, key: int, ranks: int) -> Record:
        """Make the record of a new communicator visible under `key`. Raises KeyError when the key is taken."""
        words = self._words
        earlier = self.find(key, ranks)
        if earlier is not None:
            if earlier.q[STATE] == ALIVE:
                raise KeyError(key)
            self._forget(earlier.offset)
        nbytes = record_bytes(ranks)
        offset = self._reusable(nbytes)
        if offset is None:
            offset, self._end = self._end, self._end + nbytes
            if self._end > len(self._bytes):
                raise MemoryError(f"more than {BOARD_BYTES >> 20} MiB of communicator records on one device")
        record = self._record(offset, nbytes)
        record.clear()
        for entry in range(_DIRECTORY, _DIRECTORY + 2 * _DIRECTORY_ENTRIES, 2):
            if words[entry] == 0:
                words[entry + 1] = offset
                words[entry] = key
                return record
        raise MemoryError(f"more than {_DIRECTORY_ENTRIES} open communicators on one device")

    def find(self, key: int, ranks: int) -> Record | None:
        """Return the record under `key`, or None when its owner has not opened it, or closed it long ago."""
        words = self._words
        for entry in range(_DIRECTORY, _DIRECTORY + 2 * _DIRECTORY_ENTRIES, 2):
            if words[entry] == key:
                return self._record(words[entry + 1], record_bytes(ranks))
            if words[entry] == 0 and words[entry + 1] == 0:
                return None  # never used: the directory ends here
        return None

    def close(self, key: int, ranks: int) -> None:
        """Give the record up. Peers can find it and read its last words for a good while yet."""
        words = self._words
        for entry in range(_DIRECTORY, _DIRECTORY + 2 * _DIRECTORY_ENTRIES, 2):
            if words[entry] == key:
                self._closed.append((words[entry + 1], record_bytes(ranks)))
                return

    def _forget(self, offset: int) -> None:
        """Take the record at `offset` out of the directory."""
        words = self._words
        for entry in range(_DIRECTORY, _DIRECTORY + 2 * _DIRECTORY_ENTRIES, 2):
            if words[entry + 1] == offset:
                words[entry] = 0

    def _record(self, offset: int, nbytes: int) -> Record:
        return Record(self._bytes[offset : offset + nbytes], self._address + offset, offset)

    def _reusable(self, nbytes: int) -> int | None:
        if len(self._closed) <= _KEPT_AFTER_CLOSE:
            return None
        for position in range(len(self._closed) - _KEPT_AFTER_CLOSE):
            if self._closed[position][1] == nbytes:
                offset = self._closed[position][0]
                del self._closed[position]
                self._forget(offset)
                return offset
        return None
