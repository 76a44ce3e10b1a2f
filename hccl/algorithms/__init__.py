"""Algorithms by name: each is a pure function from the number of ranks to a schedule."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

from hccl.algorithms import mesh, ring
from hccl.collectives import COLLECTIVES, collective
from hccl.errors import ArgumentError, UnsupportedError
from hccl.schedule import Schedule

ALGORITHMS: dict[str, dict[str, Callable[..., Schedule]]] = {"ring": ring.BUILDERS, "mesh": mesh.BUILDERS}

# HCCL's other algorithms: asking for one must say so instead of looking like a spelling mistake.
NOT_BUILT = ("hd", "nhr", "nb", "pairwise", "star", "pipeline", "ahc", "hierarchical", "auto")


def _builder(op: str, algo: str) -> Callable[..., Schedule]:
    collective(op)
    if algo in NOT_BUILT:
        raise UnsupportedError(f"algorithm {algo!r} is not built yet: there are {', '.join(ALGORITHMS)}")
    if algo not in ALGORITHMS:
        raise ArgumentError(f"no algorithm {algo!r}: there are {', '.join(ALGORITHMS)}")
    if op not in ALGORITHMS[algo]:
        having = [name for name, builders in ALGORITHMS.items() if op in builders]
        raise UnsupportedError(
            f"HCCL has no {algo} algorithm for {op}: {op} has {', '.join(having)}; "
            f"{algo} has {', '.join(ALGORITHMS[algo])}"
        )
    return ALGORITHMS[algo][op]


def build(op: str, algo: str, ranks: int, **options: Any) -> Schedule:
    """Make the schedule of a collective.

    op: one of `hccl.collectives.COLLECTIVES`; algo: "ring" or "mesh"; ranks: 1 or more.
    options: `root` for rooted collectives; `one_shot=True` for mesh all_reduce, reduce and broadcast: one step of full
    buffers instead of two of chunks, for small data.
    Raises: ArgumentError for what does not exist; UnsupportedError (an ArgumentError) for what HCCL does not have, or
    what this emulator does not have yet, by name.

    >>> len(list(build("all_reduce", "ring", 4).steps()))
    7
    """
    builder = _builder(op, algo)
    try:
        ranks, root = operator.index(ranks), operator.index(options.get("root", 0))
    except TypeError:
        raise ArgumentError(f"{algo} {op}: ranks and root are whole numbers, got {ranks!r} and {options!r}") from None
    if ranks < 1:
        raise ArgumentError(f"{algo} {op} needs at least 1 rank, got {ranks}")
    allowed = list(inspect.signature(builder).parameters)[1:]
    for name in options:
        if name not in allowed:
            raise ArgumentError(f"{algo} {op} has no option {name!r}; it has {', '.join(allowed) or 'none'}")
    if not 0 <= root < ranks:
        raise ArgumentError(f"{algo} {op}: root {root} is not one of {ranks} ranks")
    return builder(ranks, **options)


def variants(op: str, algo: str, ranks: int) -> Iterator[dict[str, Any]]:
    """List the options that make different schedules, for those who go through all of them.

    Every root up to 8 ranks; beyond that the first, second and last, which are where an off-by-one shows.
    """
    allowed = inspect.signature(_builder(op, algo)).parameters
    roots = range(ranks) if ranks <= 8 else (0, 1, ranks - 1)
    for root in roots if "root" in allowed else (None,):
        for one_shot in (False, True) if "one_shot" in allowed else (None,):
            chosen = {"root": root, "one_shot": one_shot}
            yield {name: value for name, value in chosen.items() if value is not None}


def built(op: str | None = None, algo: str | None = None) -> list[tuple[str, str]]:
    """List the (op, algo) pairs there are, or those of one collective or one algorithm.

    Raises: as `build` for names that do not exist.
    """
    if op is not None and algo is not None:
        _builder(op, algo)
    ops = COLLECTIVES if op is None else [collective(op).name]
    algos = ALGORITHMS if algo is None else [algo]
    for name in algos:
        if name not in ALGORITHMS:
            _builder("all_reduce", name)
    return [(o, a) for o in ops for a in algos if o in ALGORITHMS[a]]
