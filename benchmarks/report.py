"""What was to be reached, and how is it shown? The targets, and the rows of a run as tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

KIB, MIB = 1 << 10, 1 << 20
Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """At least `ratio` times as fast as Open MPI, by medians, for these ranks and sizes (bytes, both ends included)."""

    op: str
    ranks: tuple[int, ...]
    smallest: int
    largest: int
    ratio: float


TARGETS = (
    Target("all_reduce", (2,), 0, KIB, 1 / 2.5),
    Target("all_reduce", (4, 8), 0, KIB, 1 / 1.2),
    Target("all_reduce", (2, 4, 8), MIB, 64 * MIB, 2.0),
    Target("all_reduce", (4, 8), 64 * MIB, 64 * MIB, 3.0),
    Target("reduce_scatter", (2, 4, 8), MIB, 64 * MIB, 3.0),
    Target("all_gather", (2,), MIB, 64 * MIB, 0.95),
    Target("all_gather", (4, 8), MIB, 64 * MIB, 1.2),
)
EMPTY_TASK_S = 8e-6  # enqueue + synchronize, median at most
STARTUP_RANKS, STARTUP_RATIO = 8, 1.0  # mpirun of a program that imports NumPy and mpi4py / launch.py with hccl.init()


def judge(row: Row) -> Row:
    """Return the row with `target` and `met`; both None where nothing was promised."""
    target, met = None, None
    if row["part"] == "empty_task":
        target, met = EMPTY_TASK_S, row["ours_median_s"] <= EMPTY_TASK_S
    elif row["part"] == "startup" and row["ranks"] == STARTUP_RANKS:
        target, met = STARTUP_RATIO, row["ratio_median"] >= STARTUP_RATIO
    elif row.get("peer") == "mpi":
        ratios = [
            t.ratio
            for t in TARGETS
            if t.op == row["op"] and row["ranks"] in t.ranks and t.smallest <= row["bytes"] <= t.largest
        ]
        if ratios:
            target = max(ratios)
            met = row["ratio_median"] >= target
    return {**row, "target": target, "met": met}


def size_text(nbytes: int) -> str:
    """Return "64 KiB"."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def seconds_text(median_s: float, best_s: float) -> str:
    """Return "median (best)" in µs."""
    digits = 1 if median_s < 1e-3 else 0
    return f"{median_s * 1e6:,.{digits}f} ({best_s * 1e6:,.{digits}f})"


def verdict(row: Row) -> str:
    """Return the mark of a row."""
    if not row.get("correct", True):
        return "[bold red]WRONG[/]"
    if row["target"] is None:
        return ""
    wanted = f"≤ {row['target'] * 1e6:g} µs" if row["part"] == "empty_task" else f"≥ {row['target']:.3g}"
    return f"[green]ok[/] {wanted}" if row["met"] else f"[bold red]MISS[/] {wanted}"


def ratio_text(row: Row) -> str:
    """Return "ratio of medians (ratio of bests)"."""
    return f"{row['ratio_median']:.2f} ({row['ratio_best']:.2f})"


def make_table(title: str, caption: str, columns: Iterable[str]) -> Table:
    """Return an empty table with right-aligned numbers."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("operation", "target", "what") else "right", no_wrap=True)
    return table


def collectives_table(rows: list[Row], per_rank_size: bool) -> Table:
    """One line per operation, number of ranks and size, with the columns of each peer."""
    peers = list(dict.fromkeys(row["peer"] for row in rows if row["peer"]))
    size = "size: bytes of the whole buffer of each rank"
    size += " (all_reduce, all_to_all: the buffer; reduce_scatter: the send buffer; all_gather: the receive buffer)"
    if per_rank_size:
        size = "size: bytes of the buffer (all_reduce, all_to_all), of a rank's contribution (all_gather)"
        size += " or of its result (reduce_scatter)"
    caption = (
        f"{size}, at least one element per rank. Times in µs: median (best) of the slowest rank. "
        "Ratios: peer / ours, of medians (of bests), above 1 = ours is faster. "
        "bound: the time in which all ranks copy a buffer of that size at once, as a share of our time."
    )
    columns = ["operation", "ranks", "size", "ours µs"]
    columns += [name for peer in peers for name in (f"{peer} µs", f"{peer} / ours")]
    table = make_table("Collectives, float32", caption, [*columns, "bound", "target"])
    cells: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["op"], row["ranks"], row["bytes"]), {})[row["peer"]] = row
    before = None
    for (op, ranks, nbytes), cell in sorted(cells.items(), key=lambda item: _order(rows, item[0])):
        row = next(iter(cell.values()))
        if before not in (None, (op, ranks)):
            table.add_section()
        before = (op, ranks)
        line = [op, str(ranks), size_text(nbytes), seconds_text(row["ours_median_s"], row["ours_best_s"])]
        for peer in peers:
            if peer in cell:
                line += [seconds_text(cell[peer]["peer_median_s"], cell[peer]["peer_best_s"]), ratio_text(cell[peer])]
            else:
                line += ["", ""]
        marks = [mark for r in cell.values() if (mark := verdict(r))]
        table.add_row(*line, f"{row['bound_fraction']:.2f}", marks[0] if marks else "")
    return table


def _order(rows: list[Row], key: tuple[str, int, int]) -> tuple[int, int, int]:
    """Operations in the order of the command line."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    return ops.index(key[0]), key[1], key[2]


def split_table(rows: list[Row]) -> Table:
    """Small all_reduce: the totals, and where rank 0's time goes."""
    caption = (
        "µs, medians. cpu: processor time of a call, ours and MPI's, mean over all ranks. "
        "call, synchronize: time stamps around the two calls on rank 0. "
        "The next four add up to both: an empty task; what a communicator of one rank takes beyond it; "
        "what the exchange takes beyond that when all others are there already (NumPy's reduction alone in brackets); "
        "waiting. With more ranks than cores the last two are split by rank 0's processor time."
    )
    columns = ["ranks", "size", "ours µs", "mpi µs", "mpi / ours", "cpu", "call", "synchronize"]
    columns += ["= scheduler", "+ call", "+ exchange", "+ waiting", "target"]
    table = make_table("all_reduce + synchronize, taken apart", caption, columns)
    for row in rows:
        parts = [row[name] * 1e6 for name in ("host_call_s", "synchronize_s", "scheduler_s", "call_s", "exchange_s")]
        texts = [f"{part:.1f}" for part in parts]
        texts[-1] += f" ({row['reduction_s'] * 1e6:.1f})"
        table.add_row(
            str(row["ranks"]),
            size_text(row["bytes"]),
            seconds_text(row["ours_median_s"], row["ours_best_s"]),
            seconds_text(row["peer_median_s"], row["peer_best_s"]),
            ratio_text(row),
            f"{row['ours_cpu_s'] * 1e6:.1f}, {row['peer_cpu_s'] * 1e6:.1f}",
            *texts,
            f"{row['waiting_s'] * 1e6:.1f}",
            verdict(row),
        )
    return table


def single_table(rows: list[Row]) -> Table:
    """Empty task and start-up."""
    table = make_table("Overheads", "", ["what", "ranks", "median", "best", "p99 or peer", "peer / ours", "target"])
    for row in rows:
        if row["part"] == "empty_task":
            what, unit, scale = f"enqueue + synchronize, {row['task'].replace('_', ' ')}", "µs", 1e6
            third, ratio = f"p99 {row['ours_p99_s'] * 1e6:.1f} µs", ""
        else:
            what, unit, scale = "start-up, launch.py with hccl.init()", "s", 1.0
            third, ratio = f"mpirun {row['peer_median_s']:.2f} s", ratio_text(row)
        times = [f"{row[name] * scale:.2f} {unit}" for name in ("ours_median_s", "ours_best_s")]
        table.add_row(what, str(row["ranks"]), *times, third, ratio, verdict(row))
    return table


def show(report: Row) -> None:
    """Print what was measured on what."""
    console = Console(width=None if Console().is_terminal else 170, highlight=False)
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    console.print(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load'][0]:.1f} at the start; {versions}")
    rows = report["rows"]
    for part, build in (
        (("collective",), lambda some: collectives_table(some, report["settings"]["per_rank_size"])),
        (("small_split",), split_table),
        (("empty_task", "startup"), single_table),
    ):
        some = [row for row in rows if row["part"] in part]
        if some:
            console.print(build(some))
    for note in report["notes"]:
        console.print(f"note: {note}", markup=False)
    for text in [text for row in rows for text in row.get("wrong", [])]:
        console.print(f"WRONG: {text}", style="bold red", markup=False)
