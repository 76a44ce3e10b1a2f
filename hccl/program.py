"""What does one rank have to do, and when may it? A schedule compiled into epochs of actions.

Every row of a schedule becomes an action of one rank: of the rank that moves the bytes where the two share memory (`by`
of the step), of both (send, receive) where they do not. Steps are packed into *epochs*: a step joins the current epoch
unless one of its actions touches a place that another rank touches in this epoch, with a write among the two. Only
between epochs do ranks wait, and only for those with whom they really conflict. Two-phase Mesh AllReduce thus becomes
one epoch (everything that is written was read by the same rank), a ring 2(P-1) epochs with one neighbour each.

Within an epoch a rank's actions are grouped in *chains* that share slots; a chain runs tile by tile, so that a chunk is
reduced and pushed while it is in cache. This is the only place that knows about hazards, and it knows no algorithm.

Pure: no device, no clock. In and out slots that may be one place (in-place calls) are always treated as one, so that
ranks that call in place and ranks that do not wait for each other alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hccl.schedule import COPY, Schedule, Step

MOVE, SEND, RECEIVE = 0, 1, 2  # kinds of action
IN, OUT, SCRATCH = 0, 1, 2  # kinds of slot


@dataclass(frozen=True)
class Place:
    """A slot of a rank: buffer kind and index within it."""

    rank: int
    kind: int
    index: int


def place_of(schedule: Schedule, rank: int, slot: int) -> Place:
    """Split a schedule's flat slot number into buffer and index."""
    if slot < schedule.n_in:
        return Place(rank, IN, slot)
    if slot < schedule.n_in + schedule.n_out:
        return Place(rank, OUT, slot - schedule.n_in)
    return Place(rank, SCRATCH, slot - schedule.n_in - schedule.n_out)


@dataclass(frozen=True)
class Action:
    """One row, as its rank carries it out. `reduce` adds into the target, else the target is overwritten."""

    kind: int
    source: Place
    target: Place
    reduce: bool


@dataclass
class Epoch:
    """What a rank does between two waits. `waits`: for each peer, how many epochs it must have finished before."""

    waits: dict[int, int] = field(default_factory=dict)
    chains: list[list[Action]] = field(default_factory=list)
    remote: bool = False  # touches another rank's memory or messages it


@dataclass
class Program:
    """The view of one rank. Epoch 0 is `prologue` when no rank leaves its own memory in it.

    Attributes:
        epochs: as many on every rank; the ones of this rank may be empty.
        posts: epochs after which somebody waits for this rank.
        exit_waits: for each peer, how many epochs it must have finished before this rank's buffers are its own again.
        prologue: whether epoch 0 is done before the entry is announced (all ranks agree).
        user_memory: whether peers touch this rank's in or out buffers directly, so that addresses must be exchanged.
    """

    rank: int
    epochs: list[Epoch]
    posts: list[bool]
    exit_waits: dict[int, int]
    prologue: bool
    user_memory: bool


def compile_program(schedule: Schedule, rank: int, direct: Callable[[int, int], bool]) -> Program:
    """Compile `schedule` for `rank`; `direct(a, b)` tells whether ranks a and b share memory."""
    return _Compiler(schedule, direct).program(rank)


class _Compiler:
    def __init__(self, schedule: Schedule, direct: Callable[[int, int], bool]) -> None:
        self.schedule = schedule
        self.direct = direct
        self.epoch = 0
        self.actions: list[tuple[int, int, Action]] = []  # (epoch, actor, action)
        self.writer: dict[object, tuple[int, int]] = {}  # location -> (actor, epoch) of the last write
        self.readers: dict[object, dict[int, int]] = {}  # location -> actor -> epoch of its last read since
        self.needs: dict[tuple[int, int], dict[int, int]] = {}  # (actor, epoch) -> peer -> epoch it must have finished
        self._run()

    # ------------------------------------------------------------------------------------------------------ places
    def location(self, place: Place) -> object:
        """Identify what may be one piece of memory: in and out slots that an in-place call lets coincide."""
        s = self.schedule
        if place.kind == SCRATCH:
            return (place.rank, SCRATCH, place.index)
        if s.op == "all_to_all" or (s.n_in != s.n_out and 1 not in (s.n_in, s.n_out)):
            return (place.rank, place.kind, place.index)
        own = s.n_in if place.kind == IN else s.n_out
        index = place.rank if own == 1 and max(s.n_in, s.n_out) > 1 else place.index
        return (place.rank, IN, index)

    # ------------------------------------------------------------------------------------------------------- steps
    def _run(self) -> None:
        for step in self.schedule.steps():
            rows = self._rows(step)
            touched = [
                (actor, self.location(place), write)
                for actor, action in rows
                for place, write in self._touches(actor, action)
            ]
            if any(self._conflicts(actor, location, write) for actor, location, write in touched):
                self.epoch += 1
            for actor, location, write in touched:
                self._depend(actor, location, write)
            for actor, location, write in touched:
                self._note(actor, location, write)
            self.actions += [(self.epoch, actor, action) for actor, action in rows]

    def _rows(self, step: Step) -> list[tuple[int, Action]]:
        sends: list[tuple[int, Action]] = []  # before the receives of the same step, or two ranks would wait crosswise
        rows: list[tuple[int, Action]] = []
        src, dst = step.src.tolist(), step.dst.tolist()
        source_slot, target_slot = step.src_slot.tolist(), step.dst_slot.tolist()
        stride, count, op = step.stride.tolist(), step.count.tolist(), step.op.tolist()
        push = step.by == "src"
        for i, (a, b) in enumerate(zip(src, dst, strict=True)):
            reduce = op[i] != COPY
            for k in range(count[i]):
                source = place_of(self.schedule, a, source_slot[i] + k * stride[i])
                target = place_of(self.schedule, b, target_slot[i] + k * stride[i])
                if a == b or self.direct(a, b):
                    rows.append((a if push and not reduce else b, Action(MOVE, source, target, reduce)))
                else:
                    sends.append((a, Action(SEND, source, target, reduce)))
                    rows.append((b, Action(RECEIVE, source, target, reduce)))
        return sends + rows

    def _touches(self, actor: int, action: Action) -> list[tuple[Place, bool]]:
        touches = []
        if action.kind != RECEIVE:
            touches.append((action.source, False))
        if action.kind != SEND:
            touches.append((action.target, True))
        return touches

    def _conflicts(self, actor: int, location: object, write: bool) -> bool:
        """Tell whether another rank touched `location` in this epoch in a way that orders the two."""
        last = self.writer.get(location)
        if last is not None and last[0] != actor and last[1] == self.epoch:
            return True
        return write and any(r != actor and e == self.epoch for r, e in self.readers.get(location, {}).items())

    def _depend(self, actor: int, location: object, write: bool) -> None:
        """Note for whose earlier epochs `actor` has to wait before it touches `location`."""
        needs = self.needs.setdefault((actor, self.epoch), {})
        before = []
        if location in self.writer:
            before.append(self.writer[location])
        if write:
            before += list(self.readers.get(location, {}).items())
        for peer, epoch in before:
            if peer != actor and epoch < self.epoch:
                needs[peer] = max(needs.get(peer, 0), epoch + 1)

    def _note(self, actor: int, location: object, write: bool) -> None:
        if write:
            self.writer[location] = (actor, self.epoch)
            self.readers[location] = {}
        else:
            self.readers.setdefault(location, {})[actor] = self.epoch

    # ----------------------------------------------------------------------------------------------------- results
    def program(self, rank: int) -> Program:
        n_epochs = self.epoch + 1 if self.actions else 0
        touching = [self._touching(r, n_epochs) for r in range(self.schedule.ranks)]
        prologue = n_epochs > 1 and not any(self._remote(actor, a) for e, actor, a in self.actions if e == 0)
        awaited = [[False] * n_epochs for _ in range(self.schedule.ranks)]
        for needs in [*self.needs.values(), *touching]:
            for peer, epochs in needs.items():
                awaited[peer][epochs - 1] = True
        compiled: list[Epoch] = []
        reached = dict.fromkeys(range(self.schedule.ranks), 1) if prologue else {}  # entry says that epoch 0 is done
        for e in range(n_epochs):
            mine = [action for epoch, actor, action in self.actions if epoch == e and actor == rank]
            waits = {p: n for p, n in self.needs.get((rank, e), {}).items() if reached.get(p, 0) < n}
            reached.update(waits)
            compiled.append(Epoch(waits, _chains(mine, self.location), any(self._remote(rank, a) for a in mine)))
        exit_waits = {p: n for p, n in touching[rank].items() if reached.get(p, 0) < n}
        return Program(rank, compiled, awaited[rank], exit_waits, prologue, any(touching))

    def _remote(self, actor: int, action: Action) -> bool:
        return action.kind != MOVE or action.source.rank != actor or action.target.rank != actor

    def _touching(self, rank: int, n_epochs: int) -> dict[int, int]:
        """For each peer that reads or writes in or out buffers of `rank` directly: after which epoch it is done."""
        last: dict[int, int] = {}
        for epoch, actor, action in self.actions:
            if actor != rank and action.kind == MOVE:
                for place in (action.source, action.target):
                    if place.rank == rank and place.kind != SCRATCH:
                        last[actor] = max(last.get(actor, 0), epoch + 1)
        return last


def _chains(actions: list[Action], location: Callable[[Place], object]) -> list[list[Action]]:
    """Group actions that share a place (and messages with all that precede them) in order of first appearance."""
    if any(a.kind != MOVE for a in actions):
        return [[a] for a in actions]
    chains: list[tuple[set[object], list[Action]]] = []
    for action in actions:
        places = {location(action.source), location(action.target)}
        joined = [chain for chain in chains if chain[0] & places]
        if not joined:
            chains.append((places, [action]))
            continue
        first = joined[0]
        for other in joined[1:]:
            first[0].update(other[0])
            first[1].extend(other[1])
        chains = [c for c in chains if not any(c is other for other in joined[1:])]
        first[0].update(places)
        first[1].append(action)
    return [chain for _, chain in chains]
