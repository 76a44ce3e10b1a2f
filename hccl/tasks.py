"""How does one rank carry out a collective? The task that a communicator puts on a stream.

Order of events: the rank announces itself (header, progress word), waits until all have, compares the headers, does its
epochs with waits between them where ranks really conflict, and leaves when nobody touches its buffers any more. One-shot
operations do their local part first and need no second round. Nobody leaves before all have entered.

This function is the latency of small operations: it keeps to local variables and allocates nothing on the way through.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from device.stream import Stream
from device.wait import Wait, fence
from hccl import record as rec
from hccl.errors import DisagreementError
from hccl.execute import Addresses, Binder
from hccl.plan import Plan, describe_call
from hccl.program import RECEIVE, SEND, Action, Epoch
from hccl.reduce import reduce_operations
from hccl.types import ReduceOp
from hccl.waiting import ProgressWait, RecordWait, TransferWait, TurnWait

if TYPE_CHECKING:
    from hccl.communicator import Communicator
    from hccl.transport import Transfer

TaskGenerator = Generator[Wait | None, None, None]


def collective(stream: Stream, comm: Communicator, plan: Plan, turn: int, *keep: Any) -> TaskGenerator:
    """Carry out `plan` as call number `turn` of `comm`. `keep` holds the buffers alive until it is done."""
    if comm.turn != turn:
        yield TurnWait(comm, turn)
    try:
        if not comm.linked:
            yield from _link(comm, plan)
        comm.seq = seq = comm.seq + 1
        bank = seq & 1
        program = plan.program
        if plan.first:
            for function, arguments in plan.prologues[bank] or _bind_prologue(comm, plan, bank):
                function(*arguments)
        # ------------------------------------------------------------------------------------------------------- enter
        enter_s = stream.now_s
        base = comm.progress
        comm.announce(plan, bank, enter_s)
        words = comm.peer_words
        target = base + 1
        spins = comm.spins
        for word in words:
            while word[0] < target:
                if not spins:
                    yield from _wait(comm, plan, comm.peers, [target] * len(words))
                    break
                spins -= 1
        if fence is not None:
            fence()
        # ---------------------------------------------------------------------------------------------- agree, keep time
        call, count, row = plan.call, plan.count, plan.row
        latest_s = enter_s
        exit_s = enter_s + row[comm.rank]
        for peer, (head, times) in comm.peer_heads[bank]:
            if head[1] != call or head[2] != count:
                _disagree(comm, plan, bank)
            peer_s = times[3]
            if peer_s > latest_s:
                latest_s = peer_s
            if peer_s + row[peer] > exit_s:
                exit_s = peer_s + row[peer]
        # -------------------------------------------------------------------------------------------------------- epochs
        operations = None if plan.addressed else plan.bound(bank)
        if operations is None:
            operations = _bind(comm, plan, bank)
        offset = base + 1 - plan.first
        posts = program.posts
        for index in range(plan.first, len(program.epochs)):
            epoch = program.epochs[index]
            if epoch.waits:
                yield from _wait(comm, plan, list(epoch.waits), [offset + n for n in epoch.waits.values()])
            work = operations[index]
            if work.__class__ is Binder:
                yield from _messages(comm, plan, work, epoch, bank)
            else:
                for function, arguments in work:
                    function(*arguments)
            if posts[index]:
                comm.post(offset + index + 1)
        if program.exit_waits:
            yield from _wait(comm, plan, list(program.exit_waits), [offset + n for n in program.exit_waits.values()])
        # --------------------------------------------------------------------------------------------------------- leave
        comm.progress = base + plan.steps
        comm.record.q[rec.COMPLETED] = seq
        stream.now_s = exit_s
        stream.wait_s += latest_s - enter_s
        stream.comm_s += exit_s - latest_s
        plan.calls += 1
        timeline = stream.device.timeline
        if timeline.enabled:
            comm.draw(stream, plan.describe(seq), enter_s, latest_s, exit_s)
    except Exception as error:
        comm.fail(error)
        raise
    comm.turn = turn + 1


def _link(comm: Communicator, plan: Plan) -> TaskGenerator:
    """Find the records of all members, as HCCL makes its links at the first call."""
    wait = RecordWait(comm, f"the first call, {plan.describe(comm.seq + 1)}", comm.peers)
    if not wait.ready():
        yield wait
    comm.link_all()


def _wait(comm: Communicator, plan: Plan, peers: list[int], targets: list[int]) -> TaskGenerator:
    wait = ProgressWait(comm, plan.describe(comm.seq), peers, targets)
    if not wait.ready():
        yield wait
        wait.finish()


def _bind_prologue(comm: Communicator, plan: Plan, bank: int) -> list[Any]:
    """Make the operations of epoch 0 when it stays within this rank's own memory."""
    scratch = comm.scratch_of(comm.rank, bank) if plan.scratch is None else plan.scratch
    own = (*plan.buffers, scratch)
    operations = plan.binder(Addresses((own,) * comm.size), comm.view).operations(plan.program.epochs[0])
    plan.prologues[bank] = operations
    return operations


def _bind(comm: Communicator, plan: Plan, bank: int) -> list[Any]:
    """Make the operations of this call from the addresses that the peers announced (or that cannot change)."""
    buffers: list[tuple[int, int, int]] = []
    for rank in range(comm.size):
        scratch = comm.scratch_of(rank, bank)
        if rank == comm.rank:
            buffers.append((*plan.buffers, scratch if plan.scratch is None else plan.scratch))
        elif plan.addressed:
            head = comm.head_of(rank, bank)
            buffers.append((head[rec.H_IN], head[rec.H_OUT], head[rec.H_SCRATCH] or scratch))
        else:
            buffers.append((0, 0, scratch))
    return plan.operations(bank, Addresses(tuple(buffers)), comm.view)


def _disagree(comm: Communicator, plan: Plan, bank: int) -> None:
    """Raise with all the calls that differ from this rank's."""
    others = []
    for peer, (head, _) in comm.peer_heads[bank]:
        if head[rec.H_CALL] != plan.call or head[rec.H_COUNT] != plan.count:
            others.append(f"rank {peer} called {describe_call(head[rec.H_CALL], head[rec.H_COUNT])}")
    raise DisagreementError(
        f"{comm.me} called {describe_call(plan.call, plan.count)} as collective #{comm.seq} of {comm.name!r}, "
        f"but {', '.join(others)}"
    )


# ------------------------------------------------------------------------------------------------------------ messages
def _messages(comm: Communicator, plan: Plan, binder: Binder, epoch: Epoch, bank: int) -> TaskGenerator:
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
            sending.append((action, link.send(data, comm.head_of(comm.rank, bank)[rec.H_TAG])))
            continue
        for earlier, transfer in sending:  # what is being sent must not change
            if earlier.source == action.target:
                yield from _transfer(comm, plan, earlier.target.rank, transfer)
        target = binder.memory(action.target, nbytes)
        assert target is not None
        if action.kind == RECEIVE:
            arrived = np.empty(nbytes, np.uint8) if action.reduce else target
            peer = action.source.rank
            tag = comm.head_of(peer, bank)[rec.H_TAG]
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


def _transfer(comm: Communicator, plan: Plan, peer: int, transfer: Transfer) -> TaskGenerator:
    if not transfer.done():
        yield TransferWait(comm, plan.describe(comm.seq), peer, transfer)
