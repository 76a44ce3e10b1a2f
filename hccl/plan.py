"""What is worked out once per call shape: the schedule, this rank's program, its virtual time, ready operations.

A plan is pure preparation; `hccl.tasks` runs it. Bindings (views and ufuncs) depend on where the peers' buffers are, so
they are made when the peers' headers have been read and kept while the addresses stay the same.
"""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device import DeviceArray
from device.dtypes import DType, from_hccl
from hccl.execute import Addresses, Binder, Geometry, Viewer
from hccl.program import Program, place_of
from hccl.schedule import Schedule
from hccl.types import OpCode, ReduceOp

ALGORITHM_NUMBERS = {"mesh": 1, "ring": 2, "one-shot mesh": 3}
_NO_REDUCTION = 15
_serials = itertools.count(1)  # plans of this process; tells peers apart the calls of one rank, carries no state


def pack_call(code: OpCode, dtype: DType, op: ReduceOp | None, algorithm: int, root: int) -> int:
    """Put what ranks must agree on, but for the count, in one word of a header."""
    return code | dtype.hccl << 8 | (_NO_REDUCTION if op is None else op) << 16 | algorithm << 20 | root << 32


def describe_call(word: int, count: int) -> str:
    """Turn a header's call word and count back into what the user wrote."""
    code = OpCode(word & 0xFF)
    if code in (OpCode.BARRIER, OpCode.SPLIT):  # what they are made of is nobody's business
        return f"{code.label}()"
    parts = [f"{count} {from_hccl(word >> 8 & 0xFF).name}"]
    op = word >> 16 & 0xF
    if op != _NO_REDUCTION:
        parts.append(f"op {ReduceOp(op).name.lower()}")
    if code in (OpCode.BROADCAST, OpCode.REDUCE, OpCode.SCATTER):
        parts.append(f"root {word >> 32}")
    names = {number: name for name, number in ALGORITHM_NUMBERS.items()}
    algorithm = names.get(word >> 20 & 0xF)
    if algorithm:
        parts.append(f"algorithm {algorithm}")
    return f"{code.label}({', '.join(parts)})"


class Tally:
    """How often calls that send the same bytes to the same peers were finished."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Plan:
    """One call shape of one communicator: operation, buffers, count, type. Cached by the communicator."""

    def __init__(
        self,
        code: OpCode,
        schedule: Schedule,
        program: Program,
        geometry: Geometry,
        dtype: DType,
        op: ReduceOp | None,
        count: int,
        row: NDArray[np.float64],
        buffers: tuple[int, int],
        scratch: DeviceArray | None,
    ) -> None:
        one_shot = schedule.algo == "mesh" and schedule.n_scratch == 1 and schedule.chunks == 1
        number = ALGORITHM_NUMBERS["one-shot mesh" if one_shot else schedule.algo]
        self.code = code
        self.schedule = schedule
        self.program = program
        self.geometry = geometry
        self.dtype = dtype
        self.op = op
        self.count = count
        self.call = pack_call(code, dtype, op, number, schedule.root)
        self.row = row.tolist()  # exit of this rank = max over s of enter[s] + row[s]
        self.buffers = buffers
        self.scratch = None if scratch is None else scratch.address  # of scratch too large for the CCL buffer
        self.scratch_bytes = schedule.n_scratch * geometry.chunk_bytes
        self._own_scratch = scratch
        self.header = memoryview(array("q", [self.call, count]))
        self.serial = next(_serials)
        self.first = 1 if program.prologue else 0  # epochs done before entry
        self.steps = len(program.epochs) + 1 - self.first  # posts of progress that one call takes
        after_entry = program.epochs[self.first :]
        messages = any(a.kind for epoch in program.epochs for chain in epoch.chains for a in chain)
        # Between entry and exit nothing is waited for: no need for a generator unless a wait is long.
        self.straight = not messages and not any(epoch.waits for epoch in after_entry)
        posted = [index for index, post in enumerate(program.posts) if post and index >= self.first]
        self.last_post = posted[-1] + 2 - self.first if posted else 0  # progress to announce at the end, from the base
        self.exits = [(peer, 1 - self.first + n) for peer, n in program.exit_waits.items()]
        self.operations: list[list[Any] | None] = [None, None]  # of the epochs after entry, per bank
        self.known: list[list[int]] = [[-1] * schedule.ranks, [-1] * schedule.ranks]  # for which plans of the peers
        self.tally = Tally()
        self.prologues: list[Any] = [None, None]  # operations of epoch 0 when it comes before entry, per bank
        self.root = schedule.root

    def describe(self, seq: int) -> str:
        """Name this call in messages: "all_reduce #7 (1024 float32, op sum, algorithm mesh)"."""
        text = describe_call(self.call, self.count)
        name, _, rest = text.partition("(")
        return f"{name} #{seq}" + (f" ({rest}" if rest != ")" else "")

    def binder(self, addresses: Addresses, view: Viewer) -> Binder:
        """Return what turns actions into operations, for these addresses."""
        wide = self.dtype.accumulate
        return Binder(self.schedule, self.geometry, addresses, view, self.dtype.numpy, wide, self.op or ReduceOp.SUM)

    def forget(self, bank: int, peer: int, serial: int) -> None:
        """Drop the operations of a bank: `peer` calls with other buffers than last time."""
        self.operations[bank] = None
        self.known[bank][peer] = serial

    def bytes_sent(self) -> dict[int, int]:
        """Bytes that leave this rank for each peer, whoever moves them."""
        rank, schedule, span = self.program.rank, self.schedule, self.geometry.span
        sent: dict[int, int] = {}
        for step in schedule.steps():
            mine = step.select((step.src == rank) & (step.dst != rank))
            columns = (mine.dst, mine.src_slot, mine.dst_slot, mine.stride, mine.count)
            for dst, slot, target, stride, count in zip(*(c.tolist() for c in columns), strict=True):
                for k in range(0, count * stride, stride):
                    ends = (place_of(schedule, rank, slot + k), place_of(schedule, dst, target + k))
                    sent[dst] = sent.get(dst, 0) + min(span(schedule, place)[1] for place in ends)
        return sent
