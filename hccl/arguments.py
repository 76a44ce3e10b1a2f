"""Is this call allowed? Every check of arguments, each with one sentence that says who, what, expected, got.

Types and operations follow HCCL's table for the Atlas A2 (source: HCCL API reference, AllReduce, Reduce,
ReduceScatter).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from device import DeviceArray, Stream
from device.dtypes import DType
from device.dtypes import dtype as dtype_of
from hccl.errors import ArgumentError, UnsupportedError
from hccl.p2p import Item, word_of
from hccl.types import OpCode, ReduceOp

if TYPE_CHECKING:
    from hccl.communicator import Communicator

REDUCIBLE = ("int8", "int16", "int32", "int64", "float16", "float32", "bfloat16")
NO_PROD = ("int16", "bfloat16")
_UNSPLIT = (OpCode.ALL_REDUCE, OpCode.REDUCE, OpCode.BROADCAST, OpCode.BARRIER)
_ROOTED = (OpCode.REDUCE, OpCode.BROADCAST, OpCode.SCATTER)
_REDUCING = (OpCode.ALL_REDUCE, OpCode.REDUCE, OpCode.REDUCE_SCATTER, OpCode.BARRIER)


def reduce_op(op: Any, call: str) -> ReduceOp:
    """Turn "sum", "prod", "max", "min" or a `ReduceOp` into a `ReduceOp`."""
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, str) and op.upper() in ReduceOp.__members__:
        return ReduceOp[op.upper()]
    hint = "; HCCL has no average: sum and divide by the number of ranks" if str(op).lower() in ("avg", "mean") else ""
    raise ArgumentError(f"{call}: op is one of 'sum', 'prod', 'max', 'min' or a ReduceOp, got {op!r}{hint}")


class Arguments:
    """The checks of one communicator."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def _say(self, call: str, text: str) -> str:
        return f"rank {self.comm.rank}: {call}: {text}"

    # ------------------------------------------------------------------------------------------------------ pieces
    def array(self, call: str, name: str, x: Any) -> DType:
        """Check that `x` is a live contiguous array on this rank's device, of a type that HCCL moves."""
        self.comm._check_open(call)
        if not isinstance(x, DeviceArray):
            hint = "; copy it to the device first: comm.device.array(x)" if hasattr(x, "__array__") else ""
            raise ArgumentError(self._say(call, f"{name} must be a DeviceArray, got {type(x).__name__}{hint}"))
        if x.device is not self.comm.device:
            mine = self.comm.device.id
            text = f"{name} lies on device {x.device.id}, but this rank's device is {mine}"
            if x.device.id == mine:
                text = f"{name} lies on another device with the id {mine}, not on this communicator's"
            raise ArgumentError(self._say(call, text))
        if not x._alloc.live:
            raise x._alloc.dead(f"{call}: use after free")
        if not x.contiguous:
            raise ArgumentError(
                self._say(
                    call, f"{name} of shape {x.shape} is not contiguous and would stay as it is; use a contiguous copy"
                )
            )
        kind = dtype_of(x.dtype)
        if kind.hccl < 0:
            raise UnsupportedError(self._say(call, f"HCCL has no data type for {kind.name} ({name})"))
        return kind

    def stream(self, call: str, stream: Any) -> Stream:
        """Check a stream; None means the default one."""
        if stream is None:
            return self.comm.device.default_stream
        if not isinstance(stream, Stream):
            raise ArgumentError(self._say(call, f"stream must be a Stream or None, got {type(stream).__name__}"))
        if stream.device is not self.comm.device:
            raise ArgumentError(self._say(call, f"{stream.name!r} is a stream of another device"))
        return stream

    def root(self, call: str, root: Any) -> int:
        """Check a root."""
        return self._rank(call, "root", root)

    def _rank(self, call: str, name: str, rank: Any) -> int:
        if not isinstance(rank, int | np.integer) or isinstance(rank, bool):
            raise ArgumentError(self._say(call, f"{name} is a rank, got {rank!r}"))
        if not 0 <= rank < self.comm.size:
            raise ArgumentError(self._say(call, f"{name} is from 0 to {self.comm.size - 1}, got {rank}"))
        return int(rank)

    def members(self, ranks: Sequence[int]) -> list[int]:
        """Check the ranks of a sub-communicator."""
        if not hasattr(ranks, "__iter__"):
            raise ArgumentError(self._say("sub", f"ranks is a list of ranks, got {ranks!r}"))
        chosen = [self._rank("sub", "a member", r) for r in ranks]
        if not chosen:
            raise ArgumentError(self._say("sub", "a communicator needs at least one rank"))
        if len(set(chosen)) != len(chosen):
            raise ArgumentError(self._say("sub", f"each rank is named once, got {chosen}"))
        return chosen

    def part_count(self, call: str, x: Any) -> int:
        """Length of the first axis of one part of `x`."""
        self.array(call, "x", x)
        size = self.comm.size
        if x.ndim == 0 or x.shape[0] % size:
            raise ArgumentError(
                self._say(call, f"the first axis of x must be divisible by {size} ranks, got shape {x.shape}")
            )
        return int(x.shape[0]) // size

    def part(self, call: str, x: Any) -> DeviceArray:
        """Make an array for one part of `x`."""
        return self.comm.device.empty((self.part_count(call, x), *x.shape[1:]), x.dtype)

    def gathered(self, call: str, x: Any) -> DeviceArray:
        """Make an array for the parts of all ranks."""
        self.array(call, "x", x)
        first, *rest = x.shape or (1,)
        return self.comm.device.empty((first * self.comm.size, *rest), x.dtype)

    # ------------------------------------------------------------------------------------------------- collectives
    def collective(self, code: OpCode, x: Any, out: Any, op: Any, root: Any) -> ReduceOp | None:
        """Check a collective call; return its reduction."""
        call = code.label
        kind = self.array(call, "x" if x is out else "out", out)
        if x is not None and x is not out and self.array(call, "x", x) is not kind:
            raise ArgumentError(self._say(call, f"x is {x.dtype}, out is {out.dtype}"))
        if code in _ROOTED:
            self.root(call, root)
        if x is not None:
            self._sizes(code, x, out)
            self._overlap(code, x, out)
        if code not in _REDUCING:
            return None
        chosen = reduce_op(op, f"rank {self.comm.rank}: {call}")
        if kind.name not in REDUCIBLE:
            raise UnsupportedError(
                self._say(call, f"HCCL on the Atlas A2 does not reduce {kind.name}; it reduces {', '.join(REDUCIBLE)}")
            )
        if chosen is ReduceOp.PROD and kind.name in NO_PROD:
            raise UnsupportedError(self._say(call, f"HCCL on the Atlas A2 has no prod of {kind.name}"))
        return chosen

    def _sizes(self, code: OpCode, x: DeviceArray, out: DeviceArray) -> None:
        size = self.comm.size
        wanted = x.size
        if code in (OpCode.ALL_GATHER, OpCode.SPLIT):
            wanted = x.size * size
        elif code in (OpCode.REDUCE_SCATTER, OpCode.SCATTER, OpCode.ALL_TO_ALL):
            if x.size % size or (x.ndim and x.shape[0] % size):
                raise ArgumentError(
                    self._say(code.label, f"the first axis of x must be divisible by {size} ranks, got shape {x.shape}")
                )
            wanted = x.size if code is OpCode.ALL_TO_ALL else x.size // size
        if out.size != wanted:
            raise ArgumentError(
                self._say(
                    code.label,
                    f"x of shape {x.shape} on {size} ranks needs {wanted} elements in out, "
                    f"got {out.size} (shape {out.shape})",
                )
            )

    def _overlap(self, code: OpCode, x: DeviceArray, out: DeviceArray) -> None:
        """Refuse x and out that share memory in any way but the one that the operation allows."""
        if x.address + x.nbytes <= out.address or out.address + out.nbytes <= x.address:
            return
        if code in _UNSPLIT:
            allowed = x.address == out.address
        elif code is OpCode.ALL_TO_ALL or code is OpCode.SCATTER:
            allowed = code is OpCode.SCATTER and out.address == x.address + self.comm.rank * out.nbytes
        else:
            small, large = (x, out) if code in (OpCode.ALL_GATHER, OpCode.SPLIT) else (out, x)
            allowed = small.address == large.address + self.comm.rank * small.nbytes
        if not allowed:
            raise ArgumentError(
                self._say(code.label, "x and out overlap; in place means the same memory (or the own part)")
            )

    # ---------------------------------------------------------------------------------------------- point to point
    def items(self, call: str, items: Sequence[Any]) -> Sequence[tuple[str, DeviceArray, int]]:
        """Check the form of a batch."""
        for item in items:
            if not isinstance(item, tuple | list) or len(item) != 3 or item[0] not in ("send", "recv"):
                raise ArgumentError(self._say(call, f"an item is ('send' or 'recv', array, peer), got {item!r}"))
        return items

    def item(self, call: str, kind: str, x: Any, peer: Any) -> Item:
        """Check one send or receive and make the item of it."""
        dtype = self.array(call, "x", x)
        name = "dest" if kind == "send" else "source"
        peer = self._rank(call, name, peer)
        if peer == self.comm.rank and call in ("send", "recv") and self.comm._group is None:
            raise ArgumentError(
                self._say(call, f"{name} is this rank itself; pair the two in batch_send_recv or group()")
            )
        data = x._np.reshape(-1).view(np.uint8)
        return Item(kind == "send", peer, word_of(kind == "send", dtype.hccl), x.size, x.address, data)
