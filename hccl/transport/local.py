"""Links between ranks that are threads of one process: the peer's arena and board are ordinary objects."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from device import Device
from hccl.record import Board, Record
from hccl.transport.base import Link, Member


class Presence:
    """Whether a rank thread still runs its function. Set by whoever started it."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left: str | None = None


class LocalLink(Link):
    """Direct link to a rank of this process (or to oneself)."""

    def __init__(self, member: Member, device: Device, board: Board, presence: Presence | None = None) -> None:
        super().__init__(member)
        self._arena = device.arena.segment.array
        self._base = device.arena.base
        self._board = board
        self._presence = presence

    def find_record(self, key: int, ranks: int) -> Record | None:
        return self._board.find(key, ranks)

    def view(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        start = address - self._base
        return self._arena[start : start + nbytes]

    def gone(self) -> str | None:
        return None if self._presence is None else self._presence.left

    def close(self) -> None:
        """Nothing to let go of: the objects belong to their rank."""
