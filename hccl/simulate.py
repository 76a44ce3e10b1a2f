"""How long a schedule takes on a topology: per-rank clocks that move through its steps, no event queue.

A row starts at the later clock of its two ranks and ends after its transfer time (`Topology.transfer_s`). After a
step, the clock of a rank is the latest end of its rows plus γ for the bytes it reduced. All of it is maximum and
addition of constants, so exit[r] = max over s of (enter[s] + M[r, s]); `matrix` gives that M.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hccl.algorithms import build
from hccl.collectives import COLLECTIVES
from hccl.errors import ArgumentError, HcclError
from hccl.schedule import REDUCE, IntArray, Schedule, Step
from hccl.topology import PRESETS, Topology, preset, uniform

if TYPE_CHECKING:
    import argparse

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class _Ends:
    """The rows that end at each rank: at `ranks[i]`, the rows `order[starts[i]:starts[i + 1]]`.

    With `single`, every rank has at most one: then `ranks` is the column itself, row for row, and nothing is grouped.
    """

    ranks: IntArray
    order: IntArray
    starts: IntArray
    single: bool

    @classmethod
    def of(cls, column: IntArray) -> _Ends:
        order = np.argsort(column, kind="stable")
        ranks, starts = np.unique(column[order], return_index=True)
        if len(ranks) == len(column):
            return cls(column, order, starts, single=True)
        return cls(ranks, order, starts, single=False)

    def latest(self, ends: Seconds) -> Seconds:
        """The latest end at each of `ranks`."""
        return ends if self.single else np.maximum.reduceat(ends[self.order], self.starts, axis=0)


@dataclass(frozen=True)
class _Plan:
    """What a step does to the clocks; holds for every step with the same ranks, counts and operations."""

    step: Step
    src: IntArray
    dst: IntArray
    duration_s: Seconds
    at_src: _Ends
    at_dst: _Ends
    reduce_s: Seconds | None

    @classmethod
    def of(cls, step: Step, topology: Topology, chunk_bytes: float, batch: bool) -> _Plan:
        nbytes = step.count * chunk_bytes
        remote = step.src != step.dst
        src, dst = step.src[remote], step.dst[remote]
        duration_s = topology.transfer_s(src, dst, nbytes[remote])
        reduces = step.op == REDUCE
        reduce_s: Seconds | None = None
        if topology.gamma_s_per_byte > 0 and reduces.any():
            reduced = np.bincount(step.dst[reduces], nbytes[reduces], topology.ranks)
            reduce_s = np.asarray(reduced * topology.gamma_s_per_byte, dtype=np.float64)
        if batch:
            duration_s = duration_s[:, None]
            reduce_s = None if reduce_s is None else reduce_s[:, None]
        return cls(step, src, dst, duration_s, _Ends.of(src), _Ends.of(dst), reduce_s)

    def fits(self, step: Step) -> bool:
        """Whether `step` differs from the planned one in its slots only; `schedule.repeat` makes such steps."""
        mine = self.step
        return step.src is mine.src and step.dst is mine.dst and step.count is mine.count and step.op is mine.op

    def advance(self, clock: Seconds) -> None:
        """Move the clocks on by this step, in place."""
        if len(self.src):
            ends = np.maximum(clock[self.src], clock[self.dst])
            ends += self.duration_s
            # A row ends no earlier than the clocks it started from, so the first of the two may overwrite.
            clock[self.at_dst.ranks] = self.at_dst.latest(ends)
            at_src = self.at_src.ranks
            clock[at_src] = np.maximum(clock[at_src], self.at_src.latest(ends))
        if self.reduce_s is not None:
            clock += self.reduce_s


def simulate(schedule: Schedule, topology: Topology, nbytes: float, enter: ArrayLike | None = None) -> Seconds:
    """Give the virtual time at which each rank leaves the collective, in seconds.

    nbytes: bytes of the whole (gathered, unsplit) buffer, n of HCCL's cost table.
    enter: (ranks,) times at which the ranks come in, default all 0; or (ranks, K) for K runs at once, which gives the
    same numbers, to the bit, as K calls. Returns the shape of `enter`.
    Raises: ArgumentError if schedule, topology and enter do not fit together.

    >>> from hccl.topology import uniform
    >>> simulate(build("all_gather", "ring", 3), uniform(3, 1.0, 0.5), nbytes=6)
    array([4., 4., 4.])
    """
    if topology.ranks != schedule.ranks:
        raise ArgumentError(
            f"the schedule is for {schedule.ranks} ranks, the topology {topology.name!r} has {topology.ranks}"
        )
    if not 0 <= nbytes < np.inf:
        raise ArgumentError(f"nbytes is 0 or more and finite, got {nbytes!r}")
    clock = np.zeros(schedule.ranks) if enter is None else np.array(enter, dtype=np.float64)
    if clock.ndim not in (1, 2) or len(clock) != schedule.ranks:
        raise ArgumentError(f"enter has shape ({schedule.ranks},) or ({schedule.ranks}, K), got {clock.shape}")
    chunk_bytes = nbytes / schedule.chunks
    plan: _Plan | None = None
    for step in schedule.steps():
        if plan is None or not plan.fits(step):
            plan = _Plan.of(step, topology, chunk_bytes, batch=clock.ndim == 2)
        plan.advance(clock)
    return clock


def matrix(schedule: Schedule, topology: Topology, nbytes: float) -> Seconds:
    """Give M of shape (ranks, ranks) with exit[r] = max over s of (enter[s] + M[r, s]).

    M[r, s] is the longest chain of waiting, transfers and reductions by which the entering of rank s delays the
    leaving of rank r; -inf where it cannot.

    >>> from hccl.topology import uniform
    >>> matrix(build("broadcast", "ring", 3), uniform(3, 1.0, 0.5), nbytes=2)
    array([[  2.,   2., -inf],
           [  4.,   4.,   2.],
           [  4.,   4.,   2.]])
    """
    enter = np.full((schedule.ranks, schedule.ranks), -np.inf)
    np.fill_diagonal(enter, 0.0)
    return simulate(schedule, topology, nbytes, enter)


def summary(schedule: Schedule, topology: Topology, nbytes: float) -> dict[str, Any]:
    """Give the figures of one collective that all ranks enter at time 0, as plain numbers and strings.

    `virtual_s` until the last rank leaves; `latency_s` the same for no bytes; `algbw` = bytes / time and `busbw` as in
    nccl-tests, in 10**9 bytes per second (None if no time passes); `bytes_sent_per_rank` of the rank that sends most.
    """
    steps = transfers = 0
    sent = np.zeros(schedule.ranks)
    for step in schedule.steps():
        remote = step.src != step.dst
        steps += 1
        transfers += int(np.count_nonzero(remote))
        sent += np.bincount(step.src[remote], step.count[remote], schedule.ranks)
    virtual_s = float(simulate(schedule, topology, nbytes).max())
    algbw = nbytes / virtual_s / 1e9 if virtual_s > 0 else None
    factor = COLLECTIVES[schedule.op].bus_factor(schedule.ranks)
    return {
        "op": schedule.op,
        "algo": schedule.algo,
        "ranks": schedule.ranks,
        "bytes": nbytes,
        "topology": topology.name,
        "steps": steps,
        "transfers": transfers,
        "bytes_sent_per_rank": float(sent.max()) * nbytes / schedule.chunks,
        "virtual_s": virtual_s,
        "latency_s": float(simulate(schedule, topology, 0).max()),
        "algbw_gb_per_s": algbw,
        "busbw_gb_per_s": None if algbw is None else algbw * factor,
    }


def size(text: str) -> int:
    """Read a number of bytes as hccl_test does: 1024, 8K, 1M, 2G, in powers of 1024.

    >>> size("1M")
    1048576
    """
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    digits, unit = (text[:-1], units[text[-1:].upper()]) if text[-1:].upper() in units else (text, 1)
    if not digits.isdecimal():
        raise ValueError(f"a size is a number with K, M, G or nothing behind it, got {text!r}")
    return int(digits) * unit


def _topology(args: argparse.Namespace) -> Topology:
    constants = (args.alpha, args.beta, args.gamma)
    if any(value is not None for value in constants):
        if args.topology is not None or args.servers is not None:
            raise ArgumentError("--alpha, --beta, --gamma make a uniform topology: give them or --topology, not both")
        return uniform(args.ranks, *(value or 0.0 for value in constants))
    name = args.topology or ("a2" if args.ranks <= 8 and args.servers is None else "a2-cluster")
    return preset(name, ranks=args.ranks, servers=args.servers)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate one collective from the command line: status 0, or 2 for wrong arguments."""
    import argparse
    import json

    parser = argparse.ArgumentParser(
        prog="python -m hccl.simulate", description="The time of one collective on modelled NPUs and links."
    )
    parser.add_argument("--op", required=True, choices=list(COLLECTIVES))
    parser.add_argument("--algo", required=True, help="ring or mesh")
    parser.add_argument("--ranks", required=True, type=int, metavar="P")
    parser.add_argument("--bytes", required=True, type=size, metavar="N", help="the whole buffer: 1024, 8K, 1M, 2G")
    parser.add_argument("--root", type=int, metavar="R", help="root of a rooted collective (default 0)")
    parser.add_argument("--one-shot", action="store_true", help="mesh all_reduce, reduce, broadcast in one phase")
    parser.add_argument(
        "--topology", help=f"{', '.join(PRESETS)} (default: a2, beyond 8 ranks or with --servers a2-cluster)"
    )
    parser.add_argument("--servers", metavar="SxC", help="S servers of C ranks each, as 2x4")
    parser.add_argument("--alpha", type=float, metavar="S", help="uniform links instead: seconds per transfer")
    parser.add_argument("--beta", type=float, metavar="S", help="uniform links instead: seconds per byte")
    parser.add_argument("--gamma", type=float, metavar="S", help="uniform links instead: seconds per reduced byte")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--render", action="store_true", help="print the schedule, too")
    args = parser.parse_args(argv)
    options: dict[str, Any] = {} if args.root is None else {"root": args.root}
    if args.one_shot:
        options["one_shot"] = True
    try:
        schedule = build(args.op, args.algo, args.ranks, **options)
        topology = _topology(args)
        figures = summary(schedule, topology, args.bytes)
    except HcclError as error:
        print(f"hccl.simulate: {error}", file=sys.stderr)
        return 2
    for doubt in topology.lint():
        print(f"hccl.simulate: note: {doubt}", file=sys.stderr)
    if args.json:
        from hccl.render import text

        print(json.dumps(figures | ({"schedule": text(schedule)} if args.render else {})))
        return 0
    _print(schedule, figures, args.render)
    return 0


def _rate(gb_per_s: float | None) -> str:
    return "no time passes" if gb_per_s is None else f"{gb_per_s:.3f} GB/s"


def _print(schedule: Schedule, figures: dict[str, Any], render: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from hccl.render import text

    if render:
        print(text(schedule))
        print()
    table = Table(
        "", "", title="{op} by {algo}, {ranks} ranks, topology {topology}".format(**figures), show_header=False
    )
    table.columns[1].justify = "right"
    for name, value in (
        ("bytes of the whole buffer", figures["bytes"]),
        ("steps", figures["steps"]),
        ("transfers", figures["transfers"]),
        ("bytes sent by the busiest rank", round(figures["bytes_sent_per_rank"])),
        ("virtual time", f"{figures['virtual_s'] * 1e6:.3f} µs"),
        ("virtual time of no bytes", f"{figures['latency_s'] * 1e6:.3f} µs"),
        ("algbw = bytes / time", _rate(figures["algbw_gb_per_s"])),
        ("busbw as in nccl-tests", _rate(figures["busbw_gb_per_s"])),
    ):
        table.add_row(name, str(value))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
