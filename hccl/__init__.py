"""Collective communication between emulated Ascend NPUs, as HCCL does it.

Start with `init()` (or `run(function, ranks)` in one process), call operations of the `Communicator`. Schedules of the
algorithms: `build`, `hccl.verify`, `hccl.simulate`, `hccl.topology`. Heavy parts are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hccl.algorithms import build
    from hccl.bootstrap import from_root_info, get_root_info, init
    from hccl.communicator import Communicator
    from hccl.config import Config
    from hccl.errors import (
        ArgumentError,
        BrokenError,
        ClosedError,
        DisagreementError,
        HcclError,
        ScheduleError,
        TimeoutError,
        UnsupportedError,
    )
    from hccl.threads import init_all, run
    from hccl.types import HcclResult, ReduceOp

_HOME = {
    "build": "hccl.algorithms",
    "from_root_info": "hccl.bootstrap",
    "get_root_info": "hccl.bootstrap",
    "init": "hccl.bootstrap",
    "Communicator": "hccl.communicator",
    "Config": "hccl.config",
    "init_all": "hccl.threads",
    "run": "hccl.threads",
    "HcclResult": "hccl.types",
    "ReduceOp": "hccl.types",
    **dict.fromkeys(
        (
            "ArgumentError",
            "BrokenError",
            "ClosedError",
            "DisagreementError",
            "HcclError",
            "ScheduleError",
            "TimeoutError",
            "UnsupportedError",
        ),
        "hccl.errors",
    ),
}

_MODULES = ("algorithms", "collectives", "errors", "render", "schedule", "simulate", "topology", "types", "verify")

__all__ = [
    "ArgumentError",
    "BrokenError",
    "ClosedError",
    "Communicator",
    "Config",
    "DisagreementError",
    "HcclError",
    "HcclResult",
    "ReduceOp",
    "ScheduleError",
    "TimeoutError",
    "UnsupportedError",
    "build",
    "from_root_info",
    "get_root_info",
    "init",
    "init_all",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: launch.py's shim and the schedule tools need little of this."""
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"hccl.{name}")
    if name in ("capi", "manage", "split", "scaling") or name.startswith("Hccl"):
        raise AttributeError(f"hccl.{name} is not built yet")
    raise AttributeError(f"module 'hccl' has no attribute {name!r}")
