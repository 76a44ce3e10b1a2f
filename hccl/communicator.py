"""What does a user call? `Communicator`: a group of ranks, one NPU each, and the collective operations between them.

Every operation checks its arguments at once (wrong ones raise here, nothing is sent), puts one task on a stream and
returns; results are there once the stream is synchronized. Calls of one communicator happen in the order of the host's
calls, whatever streams they are put on.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np

from device import Device, DeviceArray, Stream
from device.wait import Patience
from hccl import record as rec
from hccl import tasks
from hccl.arguments import Arguments
from hccl.collectives import collective
from hccl.config import Config
from hccl.endpoint import Endpoint
from hccl.errors import ArgumentError, ClosedError, UnsupportedError
from hccl.fabric import Fabric
from hccl.p2p import batch, pair_own
from hccl.plan import Plan
from hccl.planner import Planner
from hccl.select import explain
from hccl.topology import Topology
from hccl.types import OpCode, ReduceOp

_PLANS = 256
_BARRIER_COUNT = 8  # HCCL's barrier is an AllReduce of 8 float32 on private buffers

Op = ReduceOp | str


class Communicator(Endpoint):
    """A group of ranks and this rank's place in it, as programs see it.

    Attributes:
        rank, size, name, device, topology, config: what they say; `device` is this rank's NPU.

    Raises in every operation: `ArgumentError` (this call is wrong, nothing happened), `ClosedError`, and, from the
    stream, `DisagreementError`, `BrokenError`, `TimeoutError` (the communicator is of no further use then).

    Example:
        >>> import hccl
        >>> def double(comm):
        ...     x = comm.device.array([1.0, 2.0], dtype="float32")
        ...     return comm.all_reduce(x).numpy().tolist()
        >>> hccl.run(double, ranks=2)
        [[2.0, 4.0], [2.0, 4.0]]
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
        """Internal: users come here by `hccl.init`, `hccl.run`, `from_root_info`, `split` or `sub`."""
        super().__init__(fabric, members, rank, name, topology, config, patience)
        self._group: list[tuple[str, DeviceArray, int]] | None = None
        self._subs: dict[tuple[int, ...], int] = {}
        self._splits = 0
        self._streams: dict[int, Stream] = {}
        self._latest_stream: Stream | None = None
        self._plans: dict[Any, Plan] = {}
        self._turns = itertools.count()
        self._planner = Planner(self)
        self._arguments = Arguments(self)
        self._barrier: DeviceArray | None = None

    @staticmethod
    def from_root_info(
        n_ranks: int, info: bytes, rank: int, device: Device | None = None, config: Config | None = None
    ) -> Communicator:
        """Join the communicator that `info` (from `hccl.get_root_info`) stands for; see `hccl.from_root_info`."""
        from hccl.bootstrap import from_root_info  # which makes communicators

        return from_root_info(n_ranks, info, rank, device, config)

    @staticmethod
    def from_rank_table(
        path: str, rank: int, device: Device | None = None, config: Config | None = None
    ) -> Communicator:
        """Not there yet; raises `UnsupportedError`."""
        raise UnsupportedError("from_rank_table is not built yet; use get_root_info and from_root_info")

    # ---------------------------------------------------------------------------------------------------------- queries
    def __repr__(self) -> str:
        state = f", {self._state_text}" if self._state_text else ""
        return f"<Communicator {self.name!r} rank {self.rank} of {self.size}{state}>"

    def explain(self, op: str, nbytes: int) -> str:
        """Say which algorithm a call of `nbytes` (whole buffer) takes, and why."""
        collective(op)  # says what there is when there is no such operation
        if not isinstance(nbytes, int) or nbytes < 0:
            raise ArgumentError(f"explain: nbytes is a number of bytes, got {nbytes!r}")
        return explain(op, nbytes, self.config)

    def bytes_sent(self) -> dict[int, int]:
        """Bytes that left this rank so far, by destination rank (finished calls of this communicator)."""
        total = dict(self._messages_sent)
        for sent, tally in self._tallies.items():
            for peer, nbytes in sent:
                total[peer] = total.get(peer, 0) + tally.calls * nbytes
        return {peer: nbytes for peer, nbytes in sorted(total.items()) if nbytes}

    # ------------------------------------------------------------------------------------------------------ collectives
    def all_reduce(
        self, x: DeviceArray, out: DeviceArray | None = None, op: Op = "sum", stream: Stream | None = None
    ) -> DeviceArray:
        """Combine `x` of all ranks element by element; every rank gets the result, the same to the bit.

        x, out: any equal shape and type. Without `out` the result replaces `x`. Returns the array of the result once
        queued.
        """
        return self._call(OpCode.ALL_REDUCE, x, x if out is None else out, op, 0, stream)

    def reduce(
        self, x: DeviceArray, root: int, out: DeviceArray | None = None, op: Op = "sum", stream: Stream | None = None
    ) -> DeviceArray | None:
        """Combine `x` of all ranks; `root` gets the result in `out` (a new array by default), the others None.

        `out` may be `x` itself. On the other ranks `out` is not needed; if given it is left as it is or overwritten.
        """
        if out is None:
            self._arguments.array("reduce", "x", x)
            out = self.device.empty(x.shape, x.dtype)
        self._call(OpCode.REDUCE, x, out, op, root, stream)
        return out if self.rank == root else None

    def broadcast(self, x: DeviceArray, root: int, stream: Stream | None = None) -> DeviceArray:
        """Copy `x` of `root` into `x` of every rank. Returns `x` once queued."""
        return self._call(OpCode.BROADCAST, x, x, None, root, stream)

    def all_gather(self, x: DeviceArray, out: DeviceArray | None = None, stream: Stream | None = None) -> DeviceArray:
        """Concatenate `x` of all ranks in rank order: (n, …) gives (size·n, …), on every rank.

        `x` may be this rank's part of `out`.
        """
        if out is None:
            out = self._arguments.gathered("all_gather", x)
        return self._call(OpCode.ALL_GATHER, x, out, None, 0, stream)

    def reduce_scatter(
        self, x: DeviceArray, out: DeviceArray | None = None, op: Op = "sum", stream: Stream | None = None
    ) -> DeviceArray:
        """Combine `x` of all ranks and give rank r part r: (size·n, …) gives (n, …).

        `out` may be this rank's part of `x`.
        """
        if out is None:
            out = self._arguments.part("reduce_scatter", x)
        return self._call(OpCode.REDUCE_SCATTER, x, out, op, 0, stream)

    def scatter(
        self, x: DeviceArray | None, root: int, out: DeviceArray | None = None, stream: Stream | None = None
    ) -> DeviceArray:
        """Give rank r part r of `x` of `root`: (size·n, …) gives (n, …).

        `x` counts on `root` only; the other ranks cannot know the shape of a part and have to give `out`.
        """
        if self.rank == self._arguments.root("scatter", root):
            if x is None:
                raise ArgumentError(f"{self.me}: scatter needs x on its root")
            out = self._arguments.part("scatter", x) if out is None else out
        elif out is None:
            raise ArgumentError(f"{self.me}: scatter from rank {root} needs out here, an array of one part")
        else:
            x = None
        return self._call(OpCode.SCATTER, x, out, None, root, stream)

    def all_to_all(self, x: DeviceArray, out: DeviceArray | None = None, stream: Stream | None = None) -> DeviceArray:
        """Give part s of `x` of rank r to rank s, as its part r: (size·n, …) gives (size·n, …). Not in place."""
        if out is None:
            self._arguments.part_count("all_to_all", x)
            out = self.device.empty(x.shape, x.dtype)
        return self._call(OpCode.ALL_TO_ALL, x, out, None, 0, stream)

    def barrier(self, stream: Stream | None = None) -> None:
        """Let work after it on this stream start only when all ranks have come here. Returns once queued."""
        if self._barrier is None:
            self._check_open("barrier")
            self._barrier = self.device.zeros((_BARRIER_COUNT,), "float32")
        self._call(OpCode.BARRIER, self._barrier, self._barrier, "sum", 0, stream)

    def gather(self, *args: Any, **kwargs: Any) -> DeviceArray:
        """Not in HCCL; raises `UnsupportedError`."""
        raise UnsupportedError("HCCL has no gather; use all_gather, or batch_send_recv to one rank")

    def all_gather_v(self, *args: Any, **kwargs: Any) -> DeviceArray:
        """Not there yet; raises `UnsupportedError`."""
        raise UnsupportedError("all_gather_v is not built yet; pad to equal parts and use all_gather")

    def reduce_scatter_v(self, *args: Any, **kwargs: Any) -> DeviceArray:
        """Not there yet; raises `UnsupportedError`."""
        raise UnsupportedError("reduce_scatter_v is not built yet; pad to equal parts and use reduce_scatter")

    def all_to_all_v(self, *args: Any, **kwargs: Any) -> DeviceArray:
        """Not there yet; raises `UnsupportedError`."""
        raise UnsupportedError("all_to_all_v is not built yet; use batch_send_recv")

    # ---------------------------------------------------------------------------------------------- point to point
    def send(self, x: DeviceArray, dest: int, stream: Stream | None = None) -> None:
        """Send `x` to rank `dest`. The send is over when `dest` has received it (rendezvous, as on hardware)."""
        self._point_to_point([("send", x, dest)], stream, "send")

    def recv(self, x: DeviceArray, source: int, stream: Stream | None = None) -> DeviceArray:
        """Receive into `x` what rank `source` sends; count and type must be the same. Returns `x` once queued."""
        self._point_to_point([("recv", x, source)], stream, "recv")
        return x

    def batch_send_recv(self, items: Sequence[tuple[str, DeviceArray, int]], stream: Stream | None = None) -> None:
        """Do all of [("send", x, peer), ("recv", y, peer), …] at once; the order of the list does not matter."""
        if not isinstance(items, Sequence) or isinstance(items, str):
            raise ArgumentError(
                f"{self.me}: batch_send_recv takes a list of ('send' or 'recv', array, peer), got {items!r}"
            )
        self._point_to_point(list(items), stream, "batch_send_recv")

    @contextmanager
    def group(self, stream: Stream | None = None) -> Iterator[None]:
        """Collect the sends and receives of the block and do them as one batch at its end.

        Example:
            with comm.group():
                comm.send(x, right)
                comm.recv(y, left)
        """
        if self._group is not None:
            raise ArgumentError(f"{self.me}: group() inside group()")
        self._group = []
        try:
            yield
            items, self._group = self._group, None
            if items:
                self.batch_send_recv(items, stream)
        finally:
            self._group = None

    def _point_to_point(self, items: list[tuple[str, DeviceArray, int]], stream: Stream | None, call: str) -> None:
        checked = [self._arguments.item(call, *item) for item in self._arguments.items(call, items)]
        if self._group is not None:
            if stream is not None:
                raise ArgumentError(f"{self.me}: {call} inside group() takes the stream of the group")
            self._group += items
            return
        stream = self._arguments.stream(call, stream)
        own = pair_own([i for i in checked if i.peer == self.rank], self.me)
        others = [i for i in checked if i.peer != self.rank]
        self._check_open(call)
        arrays = [x for _, x, _ in items]
        for kind, x, _ in items:
            _note_use(x._alloc, stream, writes=kind == "recv")
        stream.enqueue_call(batch, (self, others, own, arrays), self, self._turns)
        self._streams[stream.index] = stream

    # -------------------------------------------------------------------------------------------- sub-communicators
    def sub(self, ranks: Sequence[int], name: str | None = None) -> Communicator | None:
        """Return the communicator of `ranks` of this one, in this order; None on ranks that are not among them.

        No traffic, and only members need to call. All members must give the same list, as often as each other.
        """
        self._check_open("sub")
        chosen = tuple(self._arguments.members(ranks))
        number = self._subs[chosen] = self._subs.get(chosen, -1) + 1
        if self.rank not in chosen:
            return None
        if name is None:
            chosen_text = "-".join(map(str, chosen))
            if len(chosen_text) > 40:
                chosen_text = f"{zlib.crc32(chosen_text.encode()):08x}"
            name = f"{self.name}_sub_{chosen_text}_{number}"
        return Communicator(
            self._fabric,
            [self._members[r] for r in chosen],
            chosen.index(self.rank),
            name,
            self.topology.subset(chosen),
            self.config,
            self.patience,
        )

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return the communicator of the ranks that give the same `color`, ordered by `key`, then rank; collective.

        color None (or negative): this rank is in none of them and gets None.
        """
        for name, value in (("color", 0 if color is None else color), ("key", key)):
            if not isinstance(value, int | np.integer) or not -(1 << 63) <= value < 1 << 63:
                raise ArgumentError(f"{self.me}: split: {name} is an int of 64 bits, got {value!r}")
        mine = self.device.array(np.array([[-1 if color is None or color < 0 else color, key]], np.int64))
        gathered = self._arguments.gathered("split", mine)
        table = self._call(OpCode.SPLIT, mine, gathered, None, 0, None).numpy()
        self._splits += 1
        if table[self.rank, 0] < 0:
            return None
        chosen = [r for r in range(self.size) if table[r, 0] == table[self.rank, 0]]
        chosen.sort(key=lambda r: (table[r, 1], r))
        return self.sub(chosen, f"{self.name}_split_{self._splits}_{table[self.rank, 0]}")

    # ----------------------------------------------------------------------------------------------------- closing
    def close(self) -> None:
        """Finish this rank's calls and let go. Idempotent; raises the error of a call that failed and was not seen."""
        if self._state_text:
            return
        try:
            if self.aborted is None:
                for stream in self._streams.values():
                    stream.synchronize(self.config.exec_timeout_s if self.config.exec_timeout_s < 1e9 else None)
                self.see_peers_out()
        except BaseException as error:
            self._let_go(rec.FAILED, f"{type(error).__name__}: {error}")
            raise
        self._let_go(rec.CLOSED, f"closed the communicator after {self.turn} calls")

    def abort(self, reason: str = "aborted the communicator") -> None:
        """Let go at once, without waiting; peers that wait for this rank fail with `reason`."""
        if not self._state_text:
            self.aborted = self.aborted or ClosedError(f"{self.me}: {self.name!r}: this rank {reason}")
            self._let_go(rec.FAILED, reason)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.abort(f"raised {kind.__name__ if kind else ''}: {error}")

    def _let_go(self, state: int, text: str) -> None:
        self._plans.clear()
        self._barrier = None
        self.leave(state, text)

    def _check_open(self, call: str) -> None:
        if self._state_text:
            raise ClosedError(f"{self.me}: {call} on the communicator {self.name!r}, which is {self._state_text} here")
        if self.aborted is not None:
            raise self.aborted

    # ---------------------------------------------------------------------------------------------------------- submit
    def _call(
        self,
        code: OpCode,
        x: DeviceArray | None,
        out: DeviceArray,
        op: Op | None,
        root: int,
        stream: Stream | None,
    ) -> DeviceArray:
        """Queue a collective with the plan that `out` took last, one of this shape, or a new one; return `out`.

        The part of a small operation's latency that is ours: repeated calls go through without a lookup.
        """
        try:
            owner, last_code, sig, last_op, last_root, plan = out._last_call
            repeats = owner is self and last_code is code and last_op is op and last_root == root
            if not repeats or sig is not (None if x is None else x._sig):
                plan = None
        except (AttributeError, TypeError):
            plan = None  # the first call with this array, or not with an array
        if plan is None:
            plan = self._find_plan(code, x, out, op, root)
            out._last_call = (self, code, None if x is None else x._sig, op, root, plan)
        if stream is None:
            stream = self.device.default_stream
        elif stream.__class__ is not Stream or stream.device is not self.device:
            self._arguments.stream(code.label, stream)
        if self.aborted is not None:
            self._check_open(code.label)
        target = out._alloc
        if not target.live:
            raise target.dead(f"{code.label}: use after free")
        users = target.writers
        if len(users) == 1 and users[0] is stream:
            target.writers = (stream,)  # a new tuple each time, as `written_by` promises
        else:
            target.written_by(stream)
        if x is not out and x is not None:
            source = x._alloc
            if not source.live:
                raise source.dead(f"{code.label}: use after free")
            users = source.readers
            if len(users) == 1 and users[0] is stream:
                source.readers = (stream,)
            else:
                source.read_by(stream)
        stream.enqueue_call(tasks.collective, (self, plan, x, out), self, self._turns)
        if stream is not self._latest_stream:
            self._latest_stream = self._streams[stream.index] = stream
        return out

    def _find_plan(self, code: OpCode, x: DeviceArray | None, out: DeviceArray, op: Op | None, root: int) -> Plan:
        """Look up the plan of a call shape; check the arguments and make one when there is none."""
        try:
            plan = self._plans.get((code.value, None if x is None else x._sig, out._sig, op, root))
        except (AttributeError, TypeError):
            plan = None  # an argument is of the wrong kind: said by the checks
        return plan or self._plan(code, x, out, op, root)

    def _plan(self, code: OpCode, x: DeviceArray | None, out: DeviceArray, op: Op | None, root: int) -> Plan:
        """Check the arguments and work out the call shape."""
        self._check_open(code.label)
        reduce_op = self._arguments.collective(code, x, out, op, root)
        plan = self._planner.plan(code, x, out, reduce_op, root)
        plan.tally = self._tallies.setdefault(tuple(sorted(plan.bytes_sent().items())), plan.tally)
        if len(self._plans) >= _PLANS:
            self._plans.pop(next(iter(self._plans)))
        self._plans[code.value, None if x is None else x._sig, out._sig, op, root] = plan
        return plan

    def task_dropped(self, error: BaseException) -> None:
        """A stream failed before one of this communicator's calls: peers must not wait for it."""
        self.fail(error)


def _note_use(allocation: Any, stream: Stream, writes: bool) -> None:
    if writes:
        allocation.written_by(stream)
    else:
        allocation.read_by(stream)
