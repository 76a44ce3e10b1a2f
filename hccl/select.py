"""Which algorithm for which call? A pure function of operation, bytes and configuration.

Measured on shared memory: one-shot Mesh (one synchronization, everybody reduces everything) wins up to about 16 KiB,
two-phase Mesh above. HCCL switches at 256 KiB on an A2 server, where links are fast and steps dear; its full selector
comes with its other algorithms.
"""

from __future__ import annotations

from typing import Any

from hccl.config import Config

ONE_SHOT = ("all_reduce",)


def choose(op: str, nbytes: int, config: Config) -> tuple[str, dict[str, Any]]:
    """Return (algorithm, options for `hccl.build`) for `nbytes` of the whole buffer."""
    if config.algo == "ring" and op != "all_to_all":
        return "ring", {}
    if op in ONE_SHOT and config.algo == "auto" and nbytes <= config.small_bytes:
        return "mesh", {"one_shot": True}
    return "mesh", {}


def explain(op: str, nbytes: int, config: Config) -> str:
    """Say in a sentence what `choose` does and why."""
    algo, options = choose(op, nbytes, config)
    if config.algo != "auto":
        why = f"the configuration asks for {config.algo!r}" + ("" if algo == config.algo else f", which has no {op}")
    elif options.get("one_shot"):
        why = f"{nbytes} bytes are not more than small_bytes = {config.small_bytes}: one step beats two"
    else:
        why = f"{nbytes} bytes are more than one shot is good for, or {op} has none"
    shape = "one-shot Mesh" if options.get("one_shot") else algo.capitalize()
    return f"{op} of {nbytes} bytes: {shape}, because {why}"
