"""How a schedule looks to a reader: one assignment per transfer, `1.out[3] += 0.out[3]` for "rank 1 adds rank 0's"."""

from __future__ import annotations

from hccl.collectives import COLLECTIVES
from hccl.schedule import REDUCE, Schedule, Step


def _slots(schedule: Schedule, first: int, count: int, stride: int) -> str:
    """Say a range of slots like a Python slice: `out[2]`, `out[0:4]`, `out[1:8:2]`."""
    name = schedule.slot_name(first)
    if count == 1:
        return name
    buffer, _, index = name[:-1].partition("[")
    last = int(index) + (count - 1) * stride
    return f"{buffer}[{index}:{last + 1}" + (f":{stride}]" if stride != 1 else "]")


def _row(schedule: Schedule, step: Step, row: int) -> str:
    count, stride = int(step.count[row]), int(step.stride[row])
    to = _slots(schedule, int(step.dst_slot[row]), count, stride)
    source = _slots(schedule, int(step.src_slot[row]), count, stride)
    sign = "+=" if step.op[row] == REDUCE else "="
    lane = f" (lane {step.lane[row]})" if step.lane[row] else ""
    return f"{step.dst[row]}.{to} {sign} {step.src[row]}.{source}{lane}"


def _lines(cells: list[str], width: int) -> list[str]:
    """Set cells in columns of equal width, indented, in reading order."""
    column = max(map(len, cells)) + 3
    per_line = max((width - 2) // column, 1)
    rows = [cells[i : i + per_line] for i in range(0, len(cells), per_line)]
    return ["  " + "".join(cell.ljust(column) for cell in row).rstrip() for row in rows]


def _sizes(schedule: Schedule) -> str:
    of_whole = f"1/{schedule.chunks} of the whole buffer" if schedule.chunks > 1 else "the whole buffer"
    buffers = f"in {schedule.n_in}, out {schedule.n_out}, scratch {schedule.n_scratch}"
    return f"chunk = {of_whole}; chunks per rank: {buffers}" + (
        "; in and out may be one" if schedule.in_place_ok else ""
    )


def text(schedule: Schedule, *, width: int = 120, max_rows: int = 256) -> str:
    """Write a schedule out, step by step.

    Rows of a step stand in the order in which reductions are made. "pulled": the receiving rank moves the bytes of
    copies; "pushed": the sending rank does. Of a step with more than `max_rows` rows the first are shown and the
    others counted.

    >>> from hccl.algorithms import build
    >>> print(text(build("reduce", "ring", 3)))
    reduce by ring, 3 ranks, root 0
    chunk = the whole buffer; chunks per rank: in 1, out 1, scratch 1; in and out may be one
    step 0, pulled
      2.scratch[0] = 2.in[0]    2.scratch[0] += 1.in[0]
    step 1, pulled
      0.out[0] = 0.in[0]         0.out[0] += 2.scratch[0]
    """
    rooted = f", root {schedule.root}" if COLLECTIVES[schedule.op].rooted else ""
    lines = [f"{schedule.op} by {schedule.algo}, {schedule.ranks} ranks{rooted}", _sizes(schedule)]
    for number, step in enumerate(schedule.steps()):
        if (step.src == step.dst).all():
            lines.append(f"step {number}, local")
        else:
            lines.append(f"step {number}, {'pulled' if step.by == 'dst' else 'pushed'}")
        cells = [_row(schedule, step, row) for row in range(min(len(step), max_rows))]
        lines += _lines(cells, width) if cells else []
        if len(step) > max_rows:
            lines.append(f"  … and {len(step) - max_rows} more rows")
    return "\n".join(lines)
