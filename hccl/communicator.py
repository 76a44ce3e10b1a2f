"""What does a user call? `Communicator`: a group of ranks, one NPU each, and the collective operations between them.

Every operation checks its arguments at once (wrong ones raise here, nothing is sent), puts one task on a stream and
returns; results are there once the stream is synchronized. Calls of one communicator happen in the order of the host's
calls, whatever streams they are put on.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device import Device, DeviceArray, Stream
from device.wait import Futex, Patience
from hccl import record as rec
from hccl import tasks
from hccl.arguments import Arguments
from hccl.config import Config
from hccl.errors import ArgumentError, BrokenError, ClosedError, DisagreementError, HcclError, UnsupportedError
from hccl.fabric import Fabric
from hccl.p2p import batch, pair_own
from hccl.plan import Plan, Tally, describe_call
from hccl.planner import Planner
from hccl.record import Record
from hccl.select import explain
from hccl.topology import Topology
from hccl.transport import Link
from hccl.types import OpCode, ReduceOp

_PLANS = 256
_FAREWELL_S = 5.0
_SMALL_SCRATCH = 2048
_BARRIER_COUNT = 8  # HCCL's barrier is an AllReduce of 8 float32 on private buffers

Op = ReduceOp | str


class Communicator:
    """A group of ranks and this rank's place in it. Owns its record, its CCL buffer and its share of the links.

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
        self._group: list[tuple[str, DeviceArray, int]] | None = None
        self._subs: dict[tuple[int, ...], int] = {}
        self._splits = 0
        self._streams: dict[int, Stream] = {}
        self._plans: dict[Any, Plan] = {}
        self._tallies: dict[tuple[tuple[int, int], ...], Tally] = {}  # of collectives, by (peer, bytes) sent
        self._messages_sent: dict[int, int] = {}
        self._futexes: dict[tuple[int, int], Futex] = {}
        self._costs: dict[tuple[int, bool], tuple[float, float]] = {}
        self._turns = itertools.count()
        self._tags = 0
        # ---- what tasks use
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
        self.record: Record = fabric.board.open(self._key, self.size)
        self.own = self.record.q
        self._records: list[Record | None] = [None] * self.size
        self._records[rank] = self.record
        self._message_links = [self.link(p) for p in self.peers if not self.link(p).direct]
        self.poll: Callable[[], None] | None = self._message_links[0].poll if self._message_links else None
        self._scratch = fabric.device.arena.malloc(2 * (config.buffer_bytes + _SMALL_SCRATCH), "scratch")
        self.record.q[rec.SCRATCH] = self._scratch.address
        self._announced: list[Plan | None] = [None, None]
        self._heads = [_head(self.record, 0), _head(self.record, 1)]
        self._progress_futex = self.record.futex(rec.PROGRESS)
        self._planner = Planner(self)
        self._arguments = Arguments(self)
        self._barrier: DeviceArray | None = None
        fabric.retain()

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
    @property
    def me(self) -> str:
        """How messages call this rank."""
        return f"rank {self.rank}"

    @property
    def closed(self) -> bool:
        """Whether `close` or `abort` has been called here."""
        return bool(self._state_text)

    def __repr__(self) -> str:
        state = f", {self._state_text}" if self._state_text else ""
        return f"<Communicator {self.name!r} rank {self.rank} of {self.size}{state}>"

    def explain(self, op: str, nbytes: int) -> str:
        """Say which algorithm a call of `nbytes` (whole buffer) takes, and why."""
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
        """Give rank r part r of `x` of `root`: (size·n, …) gives (n, …). `x` counts on `root` only."""
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
            digest = zlib.crc32(repr(chosen).encode())
            name = f"{self.name}_sub_{digest:08x}_{number}"
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
        if color is not None and not isinstance(color, int | np.integer):
            raise ArgumentError(f"{self.me}: split: color is an int or None, got {color!r}")
        mine = self.device.array(np.array([[-1 if color is None or color < 0 else color, key]], np.int64))
        table = self.all_gather(mine).numpy()
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
                self._see_peers_out()
        except BaseException as error:
            self._leave(rec.FAILED, f"{type(error).__name__}: {error}")
            raise
        self._leave(rec.CLOSED, f"closed the communicator after {self.turn} calls")

    def abort(self, reason: str = "aborted the communicator") -> None:
        """Let go at once, without waiting; peers that wait for this rank fail with `reason`."""
        if not self._state_text:
            self.aborted = self.aborted or ClosedError(f"{self.me}: {self.name!r}: this rank {reason}")
            self._leave(rec.FAILED, reason)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.abort(f"raised {kind.__name__ if kind else ''}: {error}")

    def _see_peers_out(self) -> None:
        """Wait until nobody reads this rank's scratch: peers may still be in a call that this rank has left."""
        for peer in self.peers:
            record = self._records[peer]
            if record is not None and self.link(peer).direct:
                _wait_for(
                    lambda r=record: r.q[rec.COMPLETED] >= self.seq or r.q[rec.STATE] != rec.ALIVE,  # type: ignore[misc]
                    lambda p=peer: self.link(p).gone() is not None,  # type: ignore[misc]
                )

    def _leave(self, state: int, text: str) -> None:
        self._state_text = "closed" if state == rec.CLOSED else "aborted"
        self._say_last_words(state, text)
        self._fabric.board.close(self._key, self.size)
        self._fabric.close_name(self.name)
        self._plans.clear()
        self._barrier = None
        if self._scratch.live:
            self.device.arena.free(self._scratch)
        self._fabric.release(failed=state == rec.FAILED)

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
        sig = None if x is None else getattr(x, "_sig", None)
        last = getattr(out, "_last_call", None)
        if (
            last is not None
            and last[0] is self
            and last[1] is code
            and last[2] is sig
            and last[3] is op
            and last[4] == root
        ):
            plan: Plan = last[5]
        else:
            plan = self._find_plan(code, x, out, op, root)
            out._last_call = (self, code, sig, op, root, plan)
        if stream is None:
            stream = self.device.default_stream
        elif stream.__class__ is not Stream or stream.device is not self.device:
            self._arguments.stream(code.label, stream)
        if self.aborted is not None or self._state_text:
            self._check_open(code.label)
        target = out._alloc
        if not target.live:
            raise target.dead(f"{code.label}: use after free")
        target.written_by(stream)
        if x is not out and x is not None:
            source = x._alloc
            if not source.live:
                raise source.dead(f"{code.label}: use after free")
            source.read_by(stream)
        stream.enqueue_call(tasks.collective, (self, plan, x, out), self, self._turns)
        self._streams[stream.index] = stream
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

    # ------------------------------------------------------------------------------------------------------- for tasks
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
        times[rec.C_ENTER] = enter_s
        if self._announced[bank] is not plan:
            self._announced[bank] = plan
            head[rec.C_CALL : rec.C_ENTER] = plan.header
            head[rec.C_PLAN] = plan.serial  # stands for the addresses
            where = self.buffers_of(self.rank, bank)
            where[rec.B_IN], where[rec.B_OUT] = plan.buffers
            where[rec.B_SCRATCH] = plan.scratch or 0
        if self._message_links:
            self.buffers_of(self.rank, bank)[rec.B_TAG] = self.next_tag()
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

    def next_tag(self) -> int:
        """A message tag that this rank does not use for anything else under way (tags 2 … 2²⁰)."""
        self._tags = (self._tags + 1) % ((1 << 20) - 2)
        return self._tags + 2

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


def _head(record: Record, bank: int) -> tuple[memoryview, memoryview[float]]:
    start = rec.CALL + rec.CALL_WORDS * bank
    return record.q[start : start + rec.CALL_WORDS], record.d[start : start + rec.CALL_WORDS]


def _note_use(allocation: Any, stream: Stream, writes: bool) -> None:
    if writes:
        allocation.written_by(stream)
    else:
        allocation.read_by(stream)


def _wait_for(condition: Callable[[], bool], hopeless: Callable[[], bool]) -> None:
    """Wait a bounded time for something that needs nobody's cooperation."""
    limit = time.monotonic() + _FAREWELL_S
    pause = 10e-6
    while not condition() and time.monotonic() < limit and not (pause > 1e-3 and hopeless()):
        time.sleep(pause)
        pause = min(2 * pause, 2e-3)
