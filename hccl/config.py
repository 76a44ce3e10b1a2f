"""Which limits and choices does a communicator have? Argument before environment before default, as in HCCL.

Source of names, ranges and defaults: HCCL environment variable reference (CANN 8). Other variables of HCCL are not
read yet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from hccl.errors import ArgumentError

_VARIABLES = {  # field: (variable, lowest, highest, factor)
    "connect_timeout_s": ("HCCL_CONNECT_TIMEOUT", 120, 7200, 1),
    "exec_timeout_s": ("HCCL_EXEC_TIMEOUT", 0, 2147483647, 1),
    "buffer_bytes": ("HCCL_BUFFSIZE", 1, 1 << 20, 1 << 20),
}


@dataclass(frozen=True)
class Config:
    """Choices of one communicator; all members must have the same.

    Attributes:
        connect_timeout_s: wall seconds until all members must have come (HCCL_CONNECT_TIMEOUT, 120).
        exec_timeout_s: wall seconds that a call waits for its peers; 0 in the environment means no limit
            (HCCL_EXEC_TIMEOUT, 1836).
        buffer_bytes: size of one half of the CCL buffer (HCCL_BUFFSIZE in MiB, 200 MiB); twice this is allocated.
        algo: "auto", "ring" or "mesh".
        small_bytes: with "auto", buffers up to this size are reduced in one shot instead of in two phases.
    """

    connect_timeout_s: float = 120.0
    exec_timeout_s: float = 1836.0
    buffer_bytes: int = 200 << 20
    algo: str = "auto"
    small_bytes: int = 16 << 10

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """Read the variables above. Raises `ArgumentError` for text that HCCL would refuse."""
        environment = os.environ if environment is None else environment
        values: dict[str, float] = {}
        for name, (variable, lowest, highest, factor) in _VARIABLES.items():
            text = environment.get(variable, "")
            if not text:
                continue
            if not text.isdecimal() or len(text) > 10 or not lowest <= int(text) <= highest:
                raise ArgumentError(f"{variable}={text!r}: expected an integer from {lowest} to {highest}")
            values[name] = int(text) * factor
        if values.get("exec_timeout_s") == 0:
            values["exec_timeout_s"] = float("inf")
        return cls(**values)  # type: ignore[arg-type]

    def shared(self) -> str:
        """What members compare when they meet."""
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name != "connect_timeout_s")
