"""How does one rank carry out a collective? The task that a communicator puts on a stream.

Order of events: the rank announces itself (header, progress word), waits until all have, compares the headers, does its
epochs with waits between them where ranks really conflict, and leaves when nobody touches its buffers any more.
One-shot operations do their local part first and need no second round. Nobody leaves before all have entered.

`collective` is the latency of small operations: when nothing blocks it makes no generator and few objects.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from device.stream import Stream
from device.wait import Wait, fence, poll
from hccl import record as rec
from hccl.errors import DisagreementError
from hccl.execute import Addresses, Binder
from hccl.plan import Plan, describe_call
from hccl.program import RECEIVE, SEND, Action, Epoch
from hccl.record import COMPLETED
from hccl.reduce import Operation, reduce_operations
from hccl.types import ReduceOp
from hccl.waiting import ProgressWait, RecordWait, TransferWait, TurnWait

if TYPE_CHECKING:
    from hccl.endpoint import Endpoint
    from hccl.transport import Transfer

TaskGenerator = Generator[Wait | None, None, None]


def collective(stream: Stream, turn: int, comm: Endpoint, plan: Plan, x: Any, out: Any) -> TaskGenerator | None:
    """Carry out `plan` as call number `turn` of `comm`. The task holds `x` and `out` alive until it is done.

    What does not block is done at once; the rest is returned as a generator.
    """
    if comm.turn != turn or not comm.linked:
        return _later(stream, comm, plan, turn, (x, out))
    try:
        if comm.aborted is not None or not out._alloc.live or (x is not None and not x._alloc.live):
            _refuse(comm, plan, x, out)
        if comm.tracing:
            comm.look_at_clock()
        comm.seq = seq = comm.seq + 1
        bank = seq & 1
        if plan.first:  # the local part goes before the announcement
            for function, arguments in plan.prologues[bank] or _bind_prologue(comm, plan, bank):
                function(*arguments)
        base = comm.progress
        target = base + 1
        comm.announce(plan, bank, stream.now_s, target)
        for word in comm.peer_words:
            if word[0] < target and not poll(word, target, comm.patience):
                return _guarded(comm, turn, _wait_and_go_on(stream, comm, plan, base, (x, out)))
        if not plan.straight:
            return _guarded(comm, turn, _epochs(stream, comm, plan, base, (x, out)))
        times = _agree(stream, comm, plan)
        for epoch in plan.operations[bank] or _bind(comm, plan):
            for function, arguments in epoch:
                function(*arguments)
        if plan.last_post:
            comm.post(base + plan.last_post)
        for peer, end in plan.exits:
            word = comm.words(peer)
            if word[0] < base + end and not poll(word, base + end, comm.patience):
                return _guarded(comm, turn, _exit_slowly(stream, comm, plan, base, times, (x, out)))
        _leave(stream, comm, plan, base, times)
    except Exception as error:
        comm.fail(error)
        raise
    comm.turn = turn + 1
    return None


def _guarded(comm: Endpoint, turn: int, work: TaskGenerator) -> TaskGenerator:
    """Run the rest of a call; tell the peers when it fails, let the next call go when it is done."""
    try:
        yield from work
    except Exception as error:
        comm.fail(error)
        raise
    comm.turn = turn + 1


def _later(stream: Stream, comm: Endpoint, plan: Plan, turn: int, keep: tuple[Any, Any]) -> TaskGenerator:
    """Wait for earlier calls and, the first time, for the peers' records; then carry on."""
    if comm.turn != turn:
        yield TurnWait(comm, turn)
    if not comm.linked:
        yield from _guarded(comm, turn - 1, _link(comm, plan))
    rest = collective(stream, turn, comm, plan, keep[0], keep[1])
    if rest is not None:
        yield from rest


def _wait_and_go_on(stream: Stream, comm: Endpoint, plan: Plan, base: int, keep: Any) -> TaskGenerator:
    """Wait until all have entered, then do the rest."""
    yield from _wait(comm, plan, comm.peers, [base + 1] * len(comm.peers))
    yield from _epochs(stream, comm, plan, base, keep)


# --------------------------------------------------------------------------------------------------------- the parts
def _refuse(comm: Endpoint, plan: Plan, x: Any, out: Any) -> NoReturn:
    """Raise what stands against a call that was right when it was queued."""
    if comm.aborted is not None:
        raise comm.aborted
    raise (x if out._alloc.live else out)._alloc.dead(f"{plan.code.label}: freed while queued")


def _agree(stream: Stream, comm: Endpoint, plan: Plan) -> tuple[float, float]:
    """Compare all headers; return the virtual times of the last entry and of this rank's exit.

    A plan that a peer called with this plan before means the same call and the same buffers, so the number of the plan
    is all that has to be compared then.
    """
    if fence is not None:
        fence()
    bank = comm.seq & 1
    known, row = plan.known[bank], plan.row
    latest_s = stream.now_s
    exit_s = latest_s + row[comm.rank]
    for peer, head, times in comm.peer_heads[bank]:
        if head[3] != known[peer]:
            _meet(comm, plan, peer, head)
        peer_s = times[2]
        if peer_s > latest_s:
            latest_s = peer_s
        peer_s += row[peer]
        if peer_s > exit_s:
            exit_s = peer_s
    return latest_s, exit_s


def _meet(comm: Endpoint, plan: Plan, peer: int, head: memoryview) -> None:
    """Compare the call of a peer whose plan was not met before; drop operations made for its earlier buffers."""
    if head[rec.C_CALL] != plan.call or head[rec.C_COUNT] != plan.count:
        _disagree(comm, plan)
    plan.forget(comm.seq & 1, peer, head[rec.C_PLAN])


def _leave(stream: Stream, comm: Endpoint, plan: Plan, base: int, times: tuple[float, float]) -> None:
    """Keep the books."""
    latest_s, exit_s = times
    enter_s = stream.now_s
    comm.progress = base + plan.steps
    comm.own[COMPLETED] = comm.seq
    stream.now_s = exit_s
    stream.wait_s += latest_s - enter_s
    stream.comm_s += exit_s - latest_s
    plan.tally.calls += 1
    if comm.tracing:
        comm.draw(stream, plan.describe(comm.seq), enter_s, latest_s, exit_s)


def _epochs(stream: Stream, comm: Endpoint, plan: Plan, base: int, keep: Any) -> TaskGenerator:
    """Do the epochs, with waits between them where ranks conflict."""
    times = _agree(stream, comm, plan)
    program = plan.program
    operations = plan.operations[comm.seq & 1] or _bind(comm, plan)
    offset = base + 1 - plan.first
    for index in range(plan.first, len(program.epochs)):
        epoch = program.epochs[index]
        if epoch.waits:
            yield from _wait(comm, plan, list(epoch.waits), [offset + n for n in epoch.waits.values()])
        work = operations[index - plan.first]
        if work.__class__ is Binder:
            yield from _messages(comm, plan, work, epoch, comm.seq & 1)
        else:
            for function, arguments in work:
                function(*arguments)
        if program.posts[index]:
            comm.post(offset + index + 1)
    yield from _exit_slowly(stream, comm, plan, base, times, keep)


def _exit_slowly(
    stream: Stream, comm: Endpoint, plan: Plan, base: int, times: tuple[float, float], keep: Any
) -> TaskGenerator:
    """Wait until nobody touches this rank's buffers any more, then leave."""
    if plan.exits:
        yield from _wait(comm, plan, [peer for peer, _ in plan.exits], [base + end for _, end in plan.exits])
    _leave(stream, comm, plan, base, times)


def _link(comm: Endpoint, plan: Plan) -> TaskGenerator:
    """Find the records of all members, as HCCL makes its links at the first call."""
    wait = RecordWait(comm, partial(plan.describe, comm.seq + 1), comm.peers)
    if not wait.ready():
        yield wait
    comm.link_all()


def _wait(comm: Endpoint, plan: Plan, peers: list[int], targets: list[int]) -> TaskGenerator:
    if comm.poll is None:
        for peer, target in zip(peers, targets, strict=True):
            word = comm.words(peer)
            if word[0] < target and not poll(word, target, comm.patience):
                break
        else:
            return
    wait = ProgressWait(comm, partial(plan.describe, comm.seq), peers, targets)
    if not wait.ready():
        yield wait
        wait.finish()


def _bind_prologue(comm: Endpoint, plan: Plan, bank: int) -> Iterable[Operation]:
    """Make the operations of epoch 0 when it stays within this rank's own memory."""
    own = (*plan.buffers, plan.scratch or comm.scratch_of(comm.rank, bank, plan.scratch_bytes))
    operations = plan.binder(Addresses((own,) * comm.size), comm.view).operations(plan.program.epochs[0])
    plan.prologues[bank] = operations
    return operations


def _bind(comm: Endpoint, plan: Plan) -> list[Any]:
    """Make the operations of this call from the addresses that the peers announced."""
    bank = comm.seq & 1
    buffers: list[tuple[int, int, int]] = []
    for rank in range(comm.size):
        where = comm.buffers_of(rank, bank)
        scratch = where[rec.B_SCRATCH] or comm.scratch_of(rank, bank, plan.scratch_bytes)
        buffers.append((where[rec.B_IN], where[rec.B_OUT], scratch))
    binder = plan.binder(Addresses(tuple(buffers)), comm.view)
    operations = [
        binder if any(a.kind for chain in epoch.chains for a in chain) else binder.operations(epoch)
        for epoch in plan.program.epochs[plan.first :]
    ]
    plan.operations[bank] = operations
    return operations


def _disagree(comm: Endpoint, plan: Plan) -> None:
    """Raise with all the calls that differ from this rank's."""
    others = []
    for peer, head, _ in comm.peer_heads[comm.seq & 1]:
        if head[rec.C_CALL] and (head[rec.C_CALL] != plan.call or head[rec.C_COUNT] != plan.count):
            others.append(f"rank {peer} called {describe_call(head[rec.C_CALL], head[rec.C_COUNT])}")
    if not others:  # a peer that failed after it had entered has taken its call back
        ProgressWait(comm, partial(plan.describe, comm.seq), comm.peers, [0] * len(comm.peers)).check()
    raise DisagreementError(
        f"{comm.me} called {describe_call(plan.call, plan.count)} as collective #{comm.seq} of {comm.name!r}, "
        f"but {', '.join(others)}"
    )


# ------------------------------------------------------------------------------------------------------------ messages
def _messages(comm: Endpoint, plan: Plan, binder: Binder, epoch: Epoch, bank: int) -> TaskGenerator:
    """Carry out an epoch in which some rows cross to ranks without shared memory, in the order of the rows."""
    sending: list[tuple[Action, Transfer]] = []
    for action in (action for chain in epoch.chains for action in chain):
        nbytes = binder.size(action)
        if nbytes == 0:
            continue
        if action.kind == SEND:
            data = binder.memory(action.source, nbytes)
            assert data is not None
            link = comm.link(action.target.rank)
            sending.append((action, link.send(data, comm.buffers_of(comm.rank, bank)[rec.B_TAG])))
            continue
        for earlier, transfer in sending:  # what is being sent must not change
            if earlier.source == action.target:
                yield from _transfer(comm, plan, earlier.target.rank, transfer)
        target = binder.memory(action.target, nbytes)
        assert target is not None
        if action.kind == RECEIVE:
            arrived = np.empty(nbytes, np.uint8) if action.reduce else target
            peer = action.source.rank
            tag = comm.buffers_of(peer, bank)[rec.B_TAG]
            yield from _transfer(comm, plan, peer, comm.link(peer).receive(arrived, tag))
        else:
            source = binder.memory(action.source, nbytes)
            assert source is not None
            arrived = source
        if action.reduce:
            pair = [target.view(binder.dtype), arrived.view(binder.dtype)]
            for function, arguments in reduce_operations(plan.op or ReduceOp.SUM, pair[0], pair, binder.wide):
                function(*arguments)
        elif arrived.ctypes.data != target.ctypes.data:
            np.copyto(target, arrived)
    for action, transfer in sending:
        yield from _transfer(comm, plan, action.target.rank, transfer)


def _transfer(comm: Endpoint, plan: Plan, peer: int, transfer: Transfer) -> TaskGenerator:
    if not transfer.done():
        yield TransferWait(comm, partial(plan.describe, comm.seq), peer, transfer)
