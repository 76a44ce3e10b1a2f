"""Compiled programs are right under every interleaving that their waits allow.

The machine below runs the programs of all ranks one small piece of work at a time, in random order, and knows nothing
of how programs are made. Beside the numbers it keeps vector clocks: two touches of one place, one of them a write, that
no wait and no message orders are reported even when this run's order happened to give the right numbers.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from hccl.algorithms import build, built, variants
from hccl.program import IN, MOVE, OUT, SCRATCH, SEND, Place, Program, compile_program
from hccl.schedule import Schedule

TILES = 2  # a chunk is this many numbers; chains are run tile by tile
ENTERING, LEAVING = -2, -1  # in place of an epoch: the waits before the first and after the last


def compile_all(schedule: Schedule, domains: Sequence[int]) -> list[Program]:
    def direct(a: int, b: int) -> bool:
        return domains[a] == domains[b]

    return [compile_program(schedule, rank, direct) for rank in range(schedule.ranks)]


def domain_cases(ranks: int) -> list[list[int]]:
    """All share memory, nobody does, and mixtures: 1 + rest, halves, odd and even."""
    cases = [[0] * ranks, list(range(ranks)), [0] + [1] * (ranks - 1), [r // 2 for r in range(ranks)]]
    return [c for i, c in enumerate([*cases, [r % 2 for r in range(ranks)]]) if c not in cases[:i]]


# ----------------------------------------------------------------------------------------------------------- the oracle
class Call:
    """Inputs of one call on every rank, and what its outputs must be (None: does not matter)."""

    def __init__(self, schedule: Schedule, number: int) -> None:
        ranks, root, op = schedule.ranks, schedule.root, schedule.op
        rng = np.random.default_rng([number, ranks, root])
        per_rank = schedule.n_in if op not in ("all_gather", "gather") else 1
        self.inputs = [rng.integers(-999, 999, (per_rank, TILES)) for _ in range(ranks)]
        everything = np.concatenate(self.inputs)
        total = np.sum(self.inputs, axis=0) if per_rank == schedule.chunks else None
        outputs = {
            "all_reduce": lambda r: total,
            "reduce": lambda r: total if r == root else None,
            "broadcast": lambda r: self.inputs[root],
            "all_gather": lambda r: everything,
            "gather": lambda r: everything if r == root else None,
            "reduce_scatter": lambda r: total[r : r + 1],
            "scatter": lambda r: self.inputs[root][r : r + 1],
            "all_to_all": lambda r: np.stack([self.inputs[s][r] for s in range(ranks)]),
        }[op]
        self.outputs = [outputs(r) for r in range(ranks)]


# ---------------------------------------------------------------------------------------------------------- the machine
class Race(AssertionError):
    """Two touches of one place that nothing orders."""


class Machine:
    """Shared memory, progress words and message channels of ranks; agents beyond the ranks are messages on the way.

    left_out: a wait (rank, epoch, peer) that is not made; `implied` tells whether the other waits made up for it.
    """

    def __init__(
        self,
        schedule: Schedule,
        programs: Sequence[Program],
        in_place: Sequence[bool],
        seed: int,
        left_out: tuple[int, int, int] | None = None,
    ) -> None:
        self.schedule = schedule
        self.programs = programs
        self.in_place = in_place
        self.random = random.Random(seed)
        self.left_out = left_out
        self.implied = True
        self.memory: dict[tuple[object, ...], int] = {}
        self.clock: list[dict[int, int]] = [{r: 1} for r in range(schedule.ranks)]
        self.writes: dict[object, tuple[int, int]] = {}  # place -> (agent, its time) of the last write
        self.reads: dict[object, dict[int, int]] = defaultdict(dict)
        self.posted: list[dict[int, dict[int, int]]] = [{0: {}} for _ in programs]  # rank -> progress -> clock
        self.channels: dict[tuple[int, int], deque[list[object]]] = defaultdict(deque)
        self.agents: dict[int, tuple[Iterator[object], Callable[[], bool]]] = {}

    # ---- memory
    def cell(self, place: Place, tile: int, bank: int) -> tuple[object, ...]:
        """Give the memory that a place is: in-place ranks have in and out at one location."""
        kind, index = place.kind, place.index
        if kind == SCRATCH:
            return (place.rank, kind, bank, index, tile)
        n_in, n_out = self.schedule.n_in, self.schedule.n_out
        if self.in_place[place.rank]:
            if kind == IN and n_in < n_out:  # the input is the own part of the output
                kind, index = OUT, place.rank
            elif kind == OUT and n_out < n_in:  # the output is the own part of the input
                kind, index = IN, place.rank
            elif n_in == n_out:
                kind = IN
        return (place.rank, kind, index, tile)

    def read(self, agent: int, cell: tuple[object, ...]) -> int:
        self._ordered(agent, cell, self.writes.get(cell))
        self.reads[cell][agent] = self.clock[agent][agent]
        return self.memory.get(cell, 10**12)  # reading what nobody wrote spoils every sum

    def write(self, agent: int, cell: tuple[object, ...], value: int) -> None:
        for touch in [self.writes.get(cell), *self.reads[cell].items()]:
            self._ordered(agent, cell, touch)
        self.writes[cell] = (agent, self.clock[agent][agent])
        self.reads[cell] = {}
        self.memory[cell] = value

    def _ordered(self, agent: int, cell: object, touch: tuple[int, int] | None) -> None:
        if touch is not None and touch[0] != agent and self.clock[agent].get(touch[0], 0) < touch[1]:
            raise Race(f"{self.schedule.op} {self.schedule.algo}: {agent} and {touch[0]} touch {cell} in any order")

    # ---- order
    def join(self, agent: int, other: dict[int, int]) -> None:
        mine = self.clock[agent]
        for who, time in other.items():
            mine[who] = max(mine.get(who, 0), time)

    def post(self, rank: int, progress: int) -> None:
        self.posted[rank][progress] = dict(self.clock[rank])
        self.clock[rank][rank] += 1

    def await_progress(self, rank: int, epoch: int, targets: dict[int, int]) -> Iterator[Callable[[], bool]]:
        for peer, target in targets.items():
            if (rank, epoch, peer) != self.left_out:
                yield lambda peer=peer, target=target: max(self.posted[peer]) >= target
                self.join(rank, self._posted(peer, target))
        for peer, target in targets.items():
            if (rank, epoch, peer) == self.left_out:
                heard = max(self.posted[peer]) >= target and self._posted(peer, target)[peer]
                self.implied &= bool(heard) and self.clock[rank].get(peer, 0) >= heard

    def _posted(self, peer: int, target: int) -> dict[int, int]:
        return self.posted[peer][min(v for v in self.posted[peer] if v >= target)]

    # ---- messages: the network reads the source at any time until the send is complete
    def send(self, rank: int, source: Place, peer: int, bank: int) -> list[object]:
        agent = len(self.clock)
        self.clock.append({**self.clock[rank], agent: 1})
        self.clock[rank][rank] += 1
        message: list[object] = [False, [], agent, source]
        self.channels[rank, peer].append(message)

        def travel() -> Iterator[None]:
            for tile in range(TILES):
                yield None
                message[1].append(self.read(agent, self.cell(source, tile, bank)))
            message[0] = True

        self.agents[agent] = (travel(), lambda: True)
        return message

    def await_message(self, rank: int, message: list[object]) -> Iterator[Callable[[], bool]]:
        yield lambda: bool(message[0])
        self.join(rank, self.clock[message[2]])

    # ---- ranks
    def rank(self, rank: int, calls: Sequence[Call]) -> Iterator[Callable[[], bool] | None]:
        """What `hccl.tasks` does: announce, wait for all, epochs with their waits and posts, exit waits."""
        program = self.programs[rank]
        base = 0
        for number, call in enumerate(calls):
            bank = number % 2
            self._fill(rank, call)
            first = 1 if program.prologue else 0
            for epoch in program.epochs[:first]:
                yield from self._work(rank, epoch.chains, bank)
            self.post(rank, base + 1)
            offset = base + 1 - first
            others = [peer for peer in range(self.schedule.ranks) if peer != rank]
            yield from self.await_progress(rank, ENTERING, dict.fromkeys(others, base + 1))
            for index in range(first, len(program.epochs)):
                epoch = program.epochs[index]
                yield from self.await_progress(rank, index, {p: offset + n for p, n in epoch.waits.items()})
                yield from self._work(rank, epoch.chains, bank)
                if program.posts[index]:
                    self.post(rank, offset + index + 1)
            yield from self.await_progress(rank, LEAVING, {p: offset + n for p, n in program.exit_waits.items()})
            self._check(rank, call)
            self._spoil(rank)
            base += len(program.epochs) + 1 - first

    def _fill(self, rank: int, call: Call) -> None:
        for index, chunk in enumerate(call.inputs[rank]):
            for tile, value in enumerate(chunk.tolist()):
                self.write(rank, self.cell(Place(rank, IN, index), tile, 0), value)

    def _check(self, rank: int, call: Call) -> None:
        for index, chunk in enumerate([] if call.outputs[rank] is None else call.outputs[rank]):
            for tile, value in enumerate(chunk.tolist()):
                got = self.read(rank, self.cell(Place(rank, OUT, index), tile, 0))
                assert got == value, f"{self.schedule.op} {self.schedule.algo}: out[{index}] of rank {rank}"

    def _spoil(self, rank: int) -> None:
        """The buffers are the rank's own again: it writes what it likes."""
        for kind, size in ((IN, self.schedule.n_in), (OUT, self.schedule.n_out)):
            for index in range(size):
                for tile in range(TILES):
                    self.write(rank, self.cell(Place(rank, kind, index), tile, 0), 10**9)

    def _work(self, rank: int, chains: Sequence[Sequence], bank: int) -> Iterator[Callable[[], bool] | None]:
        sending: list[list[object]] = []
        for chain in chains:
            if any(action.kind != MOVE for action in chain):
                (action,) = chain
                if action.kind == SEND:
                    sending.append(self.send(rank, action.source, action.target.rank, bank))
                    continue
                yield from self._not_sent(rank, sending, action)
                channel = self.channels[action.source.rank, rank]
                yield lambda channel=channel: bool(channel)
                message = channel.popleft()
                yield from self.await_message(rank, message)
                for tile, value in enumerate(message[1]):
                    self._store(rank, action, tile, bank, value)
                continue
            for action in chain:
                yield from self._not_sent(rank, sending, action)
            for tile in range(TILES):
                for action in chain:
                    yield None
                    source = self.cell(action.source, tile, bank)
                    if not action.reduce and source == self.cell(action.target, tile, bank):
                        continue  # in place there is nothing to copy
                    value = self.read(rank, source)
                    self._store(rank, action, tile, bank, value)
        for message in sending:
            yield from self.await_message(rank, message)

    def _not_sent(self, rank: int, sending: list[list[object]], action: object) -> Iterator[Callable[[], bool]]:
        """What is being sent must not be overwritten."""
        for message in sending:
            if message[3] == action.target:
                yield from self.await_message(rank, message)

    def _store(self, rank: int, action: object, tile: int, bank: int, value: int) -> None:
        target = self.cell(action.target, tile, bank)
        self.write(rank, target, value + self.read(rank, target) if action.reduce else value)

    # ---- run
    def run(self, calls: int = 2) -> None:
        inputs = [Call(self.schedule, number) for number in range(calls)]
        self.agents |= {r: (self.rank(r, inputs), lambda: True) for r in range(self.schedule.ranks)}
        while self.agents:
            agents = list(self.agents)
            self.random.shuffle(agents)
            runnable = next((a for a in agents if self.agents[a][1]()), None)
            assert runnable is not None, f"{self.schedule.op} {self.schedule.algo}: deadlock"
            task = self.agents[runnable][0]
            try:
                self.agents[runnable] = (task, next(task) or (lambda: True))
            except StopIteration:
                del self.agents[runnable]


def may_be_in_place(schedule: Schedule) -> bool:
    return schedule.op != "all_to_all"


def run(schedule: Schedule, programs: Sequence[Program], seed: int) -> None:
    """Run once, with a random choice of ranks that call in place."""
    rng = random.Random(seed)
    in_place = [may_be_in_place(schedule) and rng.random() < 0.5 for _ in programs]
    Machine(schedule, programs, in_place, seed).run()


# --------------------------------------------------------------------------------------------------------- the programs
@pytest.mark.parametrize(("op", "algo"), built())
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_every_interleaving_gives_the_result(op, algo, ranks):
    for number, options in enumerate(variants(op, algo, ranks)):
        schedule = build(op, algo, ranks, **options)
        for domains in domain_cases(ranks):
            programs = compile_all(schedule, domains)
            for seed in range(2):
                run(schedule, programs, 10 * number + seed)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("op", "algo"), built())
def test_all_in_place_and_all_out_of_place_give_the_result(op, algo, in_place):
    schedule = build(op, algo, 3)
    if in_place and not may_be_in_place(schedule):
        return
    for domains in domain_cases(3):
        Machine(schedule, compile_all(schedule, domains), [in_place] * 3, 0).run(calls=4)


@pytest.mark.parametrize("domains", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 1]], ids=str)
@pytest.mark.parametrize(
    ("op", "algo"),
    [
        ("all_reduce", "mesh"),
        ("all_reduce", "ring"),
        ("reduce_scatter", "ring"),
        ("reduce", "mesh"),
        ("broadcast", "ring"),
    ],
)
def test_every_wait_is_needed_or_implied_by_the_others(op, algo, domains):
    """Damage must show: without a wait the machine finds a race or a wrong number, unless other waits say the same."""
    schedule = build(op, algo, 4)
    programs = compile_all(schedule, domains)
    waits = [(p.rank, e, peer) for p in programs for e, epoch in enumerate(p.epochs) for peer in epoch.waits]
    waits += [(p.rank, LEAVING, peer) for p in programs for peer in p.exit_waits]
    needed = 0
    for wait in waits:
        machines = [Machine(schedule, programs, [False] * 4, seed, left_out=wait) for seed in range(8)]
        wrong = any(is_wrong(machine) for machine in machines)
        assert wrong or machines[0].implied, f"nobody misses the wait {wait}"
        needed += wrong
    assert needed >= len(waits) // 2


def test_entering_too_early_is_found():
    schedule = build("all_reduce", "mesh", 3)
    machine = Machine(schedule, compile_all(schedule, [0, 0, 0]), [True] * 3, 0, left_out=(1, ENTERING, 2))
    with pytest.raises(Race, match="touch"):
        machine.run()


def is_wrong(machine: Machine) -> bool:
    try:
        machine.run()
    except AssertionError:
        return True
    return False


# --------------------------------------------------------------------------------------------- how little is waited for
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_mesh_all_reduce_is_one_epoch_between_entry_and_exit(ranks):
    for program in compile_all(build("all_reduce", "mesh", ranks), [0] * ranks):
        assert len(program.epochs) == 1
        assert not program.epochs[0].waits
        assert not program.prologue
        assert program.user_memory
        assert program.exit_waits == {peer: 1 for peer in range(ranks) if peer != program.rank}


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_one_shot_all_reduce_copies_before_entry_and_needs_no_wait_after_it(ranks):
    for program in compile_all(build("all_reduce", "mesh", ranks, one_shot=True), [0] * ranks):
        assert len(program.epochs) == 2
        assert program.prologue
        assert not program.user_memory
        assert not any(epoch.waits for epoch in program.epochs)
        assert not program.exit_waits
        assert not any(program.posts[1:])


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_ring_all_reduce_is_a_prologue_and_an_epoch_for_each_step_with_waits_for_neighbours_only(ranks):
    for program in compile_all(build("all_reduce", "ring", ranks), [0] * ranks):
        neighbours = {(program.rank - 1) % ranks, (program.rank + 1) % ranks}
        assert len(program.epochs) == 2 * (ranks - 1) + 1
        assert program.prologue
        assert all(epoch.waits.keys() <= neighbours for epoch in program.epochs)
        assert program.exit_waits.keys() <= neighbours


@pytest.mark.parametrize(("op", "algo"), built())
def test_alone_there_is_nobody_to_wait_for(op, algo):
    (program,) = compile_all(build(op, algo, 1), [0])
    assert not any(epoch.waits or epoch.remote for epoch in program.epochs)
    assert not program.exit_waits
    assert not any(program.posts)


@pytest.mark.parametrize(("op", "algo"), built())
def test_ranks_that_share_no_memory_wait_for_messages_only(op, algo):
    for program in compile_all(build(op, algo, 4), [0, 1, 2, 3]):
        assert not any(epoch.waits for epoch in program.epochs)
        assert not program.exit_waits
        assert not program.user_memory


def test_a_broadcast_root_leaves_when_its_readers_have_read_and_a_reader_that_nobody_reads_at_once():
    programs = compile_all(build("broadcast", "mesh", 3, one_shot=True), [0, 0, 0])
    assert [p.exit_waits for p in programs] == [{1: 1, 2: 1}, {}, {}]
