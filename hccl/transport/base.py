"""The contract between a rank and one peer: find its record, reach its memory or message it, know whether it lives.

Two families. A *direct* link shares memory with the peer: `view` gives the peer's device memory in place, records are
seen as they are written, `publish` and `poll` have nothing to do. A *message* link cannot: `view` returns None, the
peer's record is a shadow that `poll` updates from what the peer's `publish` sent, data goes by `send` and `receive`.
Callers ask `direct`, never for a class. Adding a transport means writing one of these and running the contract suite
(tests/hccl/test_transport.py) on it. Costs: direct wait 0.7 µs a hand-over on a free core; message 3-30 µs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hccl.record import Record


@dataclass(frozen=True)
class Member:
    """What a rank tells the others about itself when a communicator is made. Plain data, travels as JSON."""

    rank: int
    host: str  # boot id and network namespace: equal means memory can be shared
    pid: int
    device_id: int
    base: int  # first address of its device memory
    arena: dict[str, Any] = field(default_factory=dict)  # descriptor of the segment behind it
    board: dict[str, Any] = field(default_factory=dict)  # descriptor of its board
    server: int = 0  # logical server
    config: str = ""  # what all members must have in common, as text
    n_ranks: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Member:
        """Inverse of `to_json`."""
        return cls(**data)

    @property
    def who(self) -> str:
        """How messages call this rank."""
        return f"rank {self.rank} (pid {self.pid})"


class Transfer(Protocol):
    """A message under way."""

    def done(self) -> bool:
        """Tell whether the buffer is free (sent) or full (received)."""


class Link(ABC):
    """This rank's way to one peer. Owned by the fabric of the communicator's root; closed with it."""

    direct: bool = True

    def __init__(self, member: Member) -> None:
        self.member = member

    @abstractmethod
    def find_record(self, key: int, ranks: int) -> Record | None:
        """Return the peer's record of communicator `key`, or None while the peer has not opened it.

        A message link cannot know: it returns the shadow at once, all zeros until the peer has published something.
        """

    @abstractmethod
    def view(self, address: int, nbytes: int) -> NDArray[np.uint8] | None:
        """Return the peer's device memory [address, address + nbytes) in place, or None on a message link."""

    @abstractmethod
    def gone(self) -> str | None:
        """Return None while the peer lives, else a clause saying what became of it."""

    def publish(self, record: Record, key: int, first: int, count: int) -> None:  # noqa: B027 - direct links need not
        """Make words [first, first + count) of this rank's `record` visible to the peer."""

    def poll(self) -> None:  # noqa: B027 - direct links need not
        """Take in what the peer published."""

    def send(self, data: NDArray[np.uint8], tag: int) -> Transfer:
        """Send `data` under `tag`; the caller keeps it unchanged until the transfer is done."""
        raise TypeError(f"{type(self).__name__} shares memory: use view()")

    def receive(self, data: NDArray[np.uint8], tag: int) -> Transfer:
        """Receive into `data` what the peer sends under `tag`."""
        raise TypeError(f"{type(self).__name__} shares memory: use view()")

    @abstractmethod
    def close(self) -> None:
        """Let go of mappings and handles. Idempotent."""
