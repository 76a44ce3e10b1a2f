"""Is a schedule right? Contributions move instead of bytes, and every rule that is broken is named.

The state is, for every slot of every rank: which item it holds (`collectives.before`), the contributions of which
ranks are in it, and a fingerprint of how they were added up. Contributions are exact bit sets up to 256 ranks; beyond,
each rank has a random 64-bit number and a slot the sum of its contributors' (a wrong set passes with a chance of about
2**-62).

The fingerprint of "a + b" depends on those of a and b but not on which of the two came first, as IEEE addition does;
so slots with the same one hold sums that are equal to the bit. This is how the order that a schedule
promises is checked.

Rules, in the order in which a step is checked: `_sane` (rows in bounds), `_writable` (input and absent outputs
untouched), `_overlap` (nothing both read and written), `_read` (no read of nothing), `_write` (one writer, or
reductions in a defined order, of the same item, each contribution once); at the end `_finish` (every result there,
complete, in the promised order).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hccl.algorithms import build, built, variants
from hccl.collectives import COLLECTIVES, after, before
from hccl.errors import ArgumentError, HcclError, ScheduleError
from hccl.schedule import COPY, REDUCE, IntArray, Schedule, Step

Words = NDArray[np.uint64]

EXACT_RANKS = 256
_NOTHING = -1

_MIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9], dtype=np.uint64)
_SHIFT = np.array([29, 32], dtype=np.uint64)


def _added(a: Words, b: Words) -> Words:
    """Fingerprint of the sum of two values with fingerprints `a` and `b`: commutative, not associative."""
    mixed = (a + b) * _MIX[0]
    mixed ^= mixed >> _SHIFT[0]
    mixed += (a ^ b) * _MIX[1]
    mixed ^= mixed >> _SHIFT[1]
    result: Words = mixed
    return result


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a step, one chunk each: `origin` is the row in the step; `src`, `dst` are rank and slot as one number."""

    origin: IntArray
    src: IntArray
    dst: IntArray
    op: IntArray


class _Replay:
    """The state of one schedule while it is replayed, and the rules that are checked on the way."""

    def __init__(self, schedule: Schedule, in_place: bool) -> None:
        self.schedule = schedule
        self.in_place = in_place
        self.number = 0
        s = schedule
        if s.root not in range(s.ranks):
            self.fail(f"root {s.root} is not one of {s.ranks} ranks")
        try:
            spec_in = before(s.op, s.ranks, s.chunks, s.root)
            self.wanted = after(s.op, s.ranks, s.chunks, s.root)
        except ArgumentError as error:
            self.fail(str(error))
        for name, have, want in (("input", s.n_in, spec_in.shape[1]), ("output", s.n_out, self.wanted.shape[1])):
            if have != want:
                self.fail(f"has {have} {name} slots where {s.op} of {s.chunks} chunks has {want}")

        # Place of a slot: which memory of the rank it is. In place, the output is where the input is.
        self.place = np.arange(s.slots)
        if in_place:
            self.place[s.n_in :] -= s.n_in
        self.kind = np.repeat([0, 1, 2], [s.n_in, s.n_out, s.n_scratch])
        self.no_result = ~(self.wanted != _NOTHING).any(axis=1)

        self.exact = s.ranks <= EXACT_RANKS
        rng = np.random.default_rng(20240229)
        self.leaf: Words = rng.integers(1, 2**64, s.ranks, dtype=np.uint64)  # fingerprint of a single contribution
        if self.exact:
            self.single = np.zeros((s.ranks, -(-s.ranks // 64)), dtype=np.uint64)
            rank = np.arange(s.ranks)
            self.single[rank, rank // 64] = np.uint64(1) << (rank % 64).astype(np.uint64)
        else:
            self.single = rng.integers(1, 2**64, (s.ranks, 1), dtype=np.uint64)

        item = np.full((s.ranks, s.slots), _NOTHING)
        item[:, : s.n_in] = spec_in
        self.item = item.ravel()
        self.who = np.repeat(self.single, s.slots, axis=0)
        self.how = np.repeat(self.leaf, s.slots)
        self.stamp = np.zeros(s.ranks * s.slots, dtype=np.int64)

        # What complete means, per item: the contributions of all ranks that held it.
        holder, slot = np.nonzero(spec_in != _NOTHING)
        items = spec_in[holder, slot]
        self.complete = np.zeros((int(items.max()) + 1, self.single.shape[1]), dtype=np.uint64)
        gather = np.bitwise_or if self.exact else np.add
        gather.at(self.complete, items, self.single[holder])

    # ---- telling

    def fail(self, what: str) -> NoReturn:
        s = self.schedule
        options = f", root {s.root}" if COLLECTIVES[s.op].rooted else ""
        how = "in place" if self.in_place else "out of place"
        raise ScheduleError(f"{s.op} by {s.algo}, {s.ranks} ranks{options}, {how}: {what}")

    def fail_at(self, step: Step, row: int, what: str) -> NoReturn:
        s = self.schedule
        src, dst = int(step.src[row]), int(step.dst[row])
        verb = {COPY: "copy", REDUCE: "reduce"}.get(int(step.op[row]), f"op {step.op[row]}")
        src_slot, dst_slot = s.slot_name(int(step.src_slot[row])), s.slot_name(int(step.dst_slot[row]))
        count = int(step.count[row])
        chunks = f" ({count} chunks, stride {step.stride[row]})" if count != 1 else ""
        self.fail(
            f"step {self.number}, row {row} ({verb} rank {src} {src_slot} -> rank {dst} {dst_slot}{chunks}): {what}"
        )

    def at(self, place: int) -> str:
        """Say a place as rank and slot."""
        rank, slot = divmod(int(place), self.schedule.slots)
        if self.in_place:
            slot += self.schedule.n_in  # the one memory of input and output is called by its output name
        return f"rank {rank} {self.schedule.slot_name(slot)}"

    def ranks_of(self, bits: Words) -> str:
        """Say a set of contributions as ranks."""
        ranks = [r for r in range(self.schedule.ranks) if (self.single[r] & bits).any()]
        return ", ".join(map(str, ranks)) or "none"

    # ---- the rules of a step

    def step(self, step: Step) -> None:
        if len(step):
            self._sane(step)
            self._writable(step)
            rows = self._expand(step)
            self._overlap(step, rows)
            self._read(step, rows)
            self._write(step, rows)
        self.number += 1

    def _sane(self, step: Step) -> None:
        s = self.schedule
        for column, low, high, name in (
            (step.src, 0, s.ranks, "src rank"),
            (step.dst, 0, s.ranks, "dst rank"),
            (step.src_slot, 0, s.slots, "src slot"),
            (step.dst_slot, 0, s.slots, "dst slot"),
            (step.op, COPY, REDUCE + 1, "op"),
            (step.count, 1, None, "count"),
            (step.stride, 1, None, "stride"),
            (step.lane, 0, None, "lane"),
        ):
            # ufunc.reduce: a third of the time of column.min(), and this is most of what a short step costs
            if np.minimum.reduce(column) < low or (high is not None and np.maximum.reduce(column) >= high):
                row = int(np.argmax((column < low) | (column >= (np.inf if high is None else high))))
                bound = f"{low} or more" if high is None else f"{low} to {high - 1}"
                self.fail_at(step, row, f"{name} is {bound}, got {column[row]}")
        reach = (step.count - 1) * step.stride
        for first, name in ((step.src_slot, "src"), (step.dst_slot, "dst")):
            last = first + reach
            over = (last >= s.slots) | (self.kind[np.minimum(last, s.slots - 1)] != self.kind[first])
            if over.any():
                self.fail_at(step, int(over.argmax()), f"{name} chunks run past the end of the buffer")

    def _writable(self, step: Step) -> None:
        writes_in = step.dst_slot < self.schedule.n_in
        if writes_in.any():
            self.fail_at(step, int(writes_in.argmax()), "writes to the input, which belongs to the caller")
        if self.no_result.any():
            for rank, slot, verb in ((step.src, step.src_slot, "reads"), (step.dst, step.dst_slot, "writes")):
                absent = (self.kind[slot] == 1) & self.no_result[rank]
                if absent.any():
                    row = int(absent.argmax())
                    self.fail_at(step, row, f"{verb} the output of rank {rank[row]}, which has no result and no output")

    def _expand(self, step: Step) -> _Rows:
        slots = self.schedule.slots
        origin = np.arange(len(step))
        src_slot, dst_slot, src, dst, op = step.src_slot, step.dst_slot, step.src, step.dst, step.op
        if int(step.count.max()) > 1:
            origin = np.repeat(origin, step.count)
            nth = np.arange(len(origin)) - np.repeat(np.cumsum(step.count) - step.count, step.count)
            on = nth * step.stride[origin]
            src_slot, dst_slot, op = src_slot[origin] + on, dst_slot[origin] + on, op[origin]
            src, dst = src[origin], dst[origin]
        at_src, at_dst = src * slots + self.place[src_slot], dst * slots + self.place[dst_slot]
        if self.in_place:
            same = (at_src == at_dst) & (op == COPY) & (src_slot != dst_slot)
            if same.any():  # a copy of the input to the output is already done when they are one
                keep = ~same
                return _Rows(origin[keep], at_src[keep], at_dst[keep], op[keep])
        return _Rows(origin, at_src, at_dst, op)

    def _overlap(self, step: Step, rows: _Rows) -> None:
        self.stamp[rows.dst] = self.number + 1
        clash = self.stamp[rows.src] == self.number + 1
        if clash.any():
            i = int(clash.argmax())
            j = int(np.argmax(rows.dst == rows.src[i]))
            what = f"reads {self.at(rows.src[i])}, which row {rows.origin[j]} writes in the same step"
            if i == j:
                what = f"reads and writes the same chunk, {self.at(rows.src[i])}"
            self.fail_at(step, int(rows.origin[i]), what)

    def _read(self, step: Step, rows: _Rows) -> None:
        empty = self.item[rows.src] == _NOTHING
        if empty.any():
            i = int(empty.argmax())
            self.fail_at(step, int(rows.origin[i]), f"reads nothing: {self.at(rows.src[i])} has not been written")

    def _write(self, step: Step, rows: _Rows) -> None:
        n = len(rows.dst)
        # No row reads what another writes (`_overlap`), so all see the state before the step whatever is written first.
        number = -np.arange(1, n + 1)  # negative: never equal to the stamp of a step
        self.stamp[rows.dst] = number
        if np.array_equal(self.stamp[rows.dst], number):  # one writer each, the usual case
            self._apply(step, rows, slice(None))
            return
        order = np.argsort(rows.dst, kind="stable")
        dst = rows.dst[order]
        index = np.arange(n)
        first = index * np.concatenate([[False], dst[1:] != dst[:-1]])
        nth = index - np.maximum.accumulate(first)
        self._ordered(step, rows, order, nth)
        for k in range(int(nth.max()) + 1):
            self._apply(step, rows, order[nth == k])

    def _ordered(self, step: Step, rows: _Rows, order: IntArray, nth: IntArray) -> None:
        """Several rows write one chunk: one copy at most, first, and all moved by one rank on one lane."""
        late = np.flatnonzero((nth > 0) & (rows.op[order] == COPY))
        if len(late):
            this, other = int(rows.origin[order[late[0]]]), int(rows.origin[order[late[0] - 1]])
            where = self.at(rows.dst[order[late[0]]])
            if int(step.op[other]) == COPY:
                self.fail_at(step, this, f"two copies write {where} in one step, row {other} and this one")
            self.fail_at(step, this, f"copies over {where}, into which row {other} reduces in the same step")
        follows = np.flatnonzero(nth > 0)
        row, first = rows.origin[order[follows]], rows.origin[order[follows - 1]]
        apart = np.flatnonzero(step.lane[row] != step.lane[first])
        if len(apart):
            i = int(apart[0])
            self.fail_at(step, int(row[i]), f"reduces into one chunk from two lanes, as does row {first[i]}: no order")
        if step.by == "src":
            pushed = np.flatnonzero((step.op[first] == COPY) & (step.src[first] != step.dst[first]))
            if len(pushed):
                i = int(pushed[0])
                self.fail_at(
                    step, int(row[i]), f"reduces into a chunk to which row {first[i]} is pushed by its sender: no order"
                )

    def _apply(self, step: Step, rows: _Rows, chosen: Any) -> None:
        """Do rows of different destinations."""
        origin, src, dst, op = rows.origin[chosen], rows.src[chosen], rows.dst[chosen], rows.op[chosen]
        item, who, how = self.item[src], self.who[src], self.how[src]
        reduces = op == REDUCE
        if reduces.any():
            if not reduces.all():
                copies = ~reduces
                at = dst[copies]
                self.item[at], self.who[at], self.how[at] = item[copies], who[copies], how[copies]
                origin, dst, item, who, how = origin[reduces], dst[reduces], item[reduces], who[reduces], how[reduces]
            who, how = self._reduced(step, origin, dst, item, who, how)
        self.item[dst], self.who[dst], self.how[dst] = item, who, how

    def _reduced(
        self, step: Step, origin: IntArray, dst: IntArray, item: IntArray, who: Words, how: Words
    ) -> tuple[Words, Words]:
        there, there_who = self.item[dst], self.who[dst]
        if not np.array_equal(there, item):
            i = int(np.argmax(there != item))
            if there[i] == _NOTHING:
                self.fail_at(step, int(origin[i]), f"reduces into nothing: {self.at(dst[i])} has not been written")
            self.fail_at(step, int(origin[i]), f"adds chunk {item[i]} to chunk {there[i]} in {self.at(dst[i])}")
        if self.exact:
            twice = there_who & who
            if twice.any():
                i = int(np.argmax(twice.any(axis=1)))
                self.fail_at(
                    step,
                    int(origin[i]),
                    f"adds the contribution of rank {self.ranks_of(twice[i])} to chunk {item[i]} a second time",
                )
            return there_who | who, _added(self.how[dst], how)
        return there_who + who, _added(self.how[dst], how)

    # ---- the result

    def finish(self) -> None:
        s = self.schedule
        rank, slot = np.nonzero(self.wanted != _NOTHING)
        place = rank * s.slots + self.place[s.n_in + slot]
        want, have, how = self.wanted[rank, slot], self.item[place], self.how[place]

        def result(i: int) -> str:
            return f"at the end, rank {rank[i]} {s.slot_name(s.n_in + int(slot[i]))}"

        if not np.array_equal(want, have):
            i = int(np.argmax(want != have))
            got = "nothing" if have[i] == _NOTHING else f"chunk {have[i]}"
            self.fail(f"{result(i)} holds {got} instead of chunk {want[i]}")
        who, complete = self.who[place], self.complete[want]
        wrong = (who != complete).any(axis=1)
        if wrong.any():
            i = int(wrong.argmax())
            if self.exact:
                missing = self.ranks_of(complete[i] & ~who[i])
                self.fail(f"{result(i)}: chunk {want[i]} lacks the contribution of rank {missing}")
            self.fail(f"{result(i)}: chunk {want[i]} lacks contributions, or has some twice")
        if not COLLECTIVES[s.op].reduces:
            return
        if s.sum_from is not None:
            differs = how != self._promised()[want]
            if differs.any():
                i = int(differs.argmax())
                first = self._first()[want[i]]
                self.fail(f"{result(i)}: chunk {want[i]} is not summed in the promised order, rank {first} upwards")
        leader = np.empty(len(self.complete), dtype=np.int64)
        leader[want[::-1]] = np.arange(len(want))[::-1]  # the first result of each item
        differs = how != how[leader[want]]
        if differs.any():
            i = int(differs.argmax())
            self.fail(f"{result(i)}: chunk {want[i]} is summed in another order than at rank {rank[leader[want[i]]]}")

    def _first(self) -> IntArray:
        a, b = self.schedule.sum_from or (0, 0)
        first: IntArray = (a + b * np.arange(self.schedule.chunks)) % self.schedule.ranks
        return first

    def _promised(self) -> Words:
        """Fingerprint of each chunk's sum in the order that the schedule promises."""
        first = self._first()
        how = self.leaf[first]
        for k in range(1, self.schedule.ranks):
            how = _added(how, self.leaf[(first + k) % self.schedule.ranks])
        return how


def verify(schedule: Schedule, in_place: bool | None = None) -> None:
    """Check that a schedule does its collective and breaks no rule; return nothing if so.

    in_place: check with input and output in the same memory, or in different memory; None: both, where allowed.
    Raises: ScheduleError naming step, row, rank and chunk of the first rule broken.

    >>> verify(build("all_reduce", "ring", 5))
    """
    if in_place and not schedule.in_place_ok:
        raise ScheduleError(f"{schedule.op} by {schedule.algo} does not allow input and output in the same memory")
    for mode in (False, True) if in_place is None else (in_place,):
        if mode and not schedule.in_place_ok:
            continue
        replay = _Replay(schedule, mode)
        for step in schedule.steps():
            replay.step(step)
        replay.finish()


def cases(op: str | None = None, algo: str | None = None, max_ranks: int | None = None) -> Iterator[Schedule]:
    """Make every schedule there is, of one collective or algorithm if given, up to `max_ranks`.

    Without `max_ranks`: 1 to 33 ranks, which has all small cases and both sides of 32, and 64, the width of a machine
    word.
    """
    sizes = [*range(1, 34), 64] if max_ranks is None else range(1, max_ranks + 1)
    for name, algorithm in built(op, algo):
        for ranks in sizes:
            for options in variants(name, algorithm, ranks):
                yield build(name, algorithm, ranks, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Verify from the command line: status 0; 1 and the first broken rule on stderr; 2 for wrong arguments."""
    import argparse
    import time

    parser = argparse.ArgumentParser(prog="python -m hccl.verify", description="Prove the schedules of collectives.")
    parser.add_argument("--op", choices=list(COLLECTIVES), help="one collective only")
    parser.add_argument("--algo", help="one algorithm only")
    parser.add_argument("--max-ranks", type=int, metavar="P", help="1 to P ranks (default: 1 to 33, and 64)")
    args = parser.parse_args(argv)
    if args.max_ranks is not None and args.max_ranks < 1:
        parser.error(f"--max-ranks is 1 or more, got {args.max_ranks}")
    began = time.perf_counter()
    proven: dict[tuple[str, str], int] = {}
    try:
        for schedule in cases(args.op, args.algo, args.max_ranks):
            verify(schedule)
            key = (schedule.op, schedule.algo)
            proven[key] = proven.get(key, 0) + 1
    except ScheduleError as error:
        print(f"not proven: {error}", file=sys.stderr)
        return 1
    except HcclError as error:
        print(f"hccl.verify: {error}", file=sys.stderr)
        return 2

    from rich.console import Console
    from rich.table import Table

    most = args.max_ranks or 64
    wall_s = time.perf_counter() - began
    table = Table(caption=f"{sum(proven.values())} schedules of up to {most} ranks proven in {wall_s:.1f} s")
    table.add_column("collective")
    table.add_column("algorithm")
    table.add_column("schedules proven", justify="right")
    for (op, algo), number in proven.items():
        table.add_row(op, algo, str(number))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
