"""Models of parallelism over `hccl` communicators. Start with `shard`, `ring_attention`, `unshard`."""

from typing import Any

from parallel.ring import ring_attention, ring_attention_backward
from parallel.sharding import LAYOUTS, positions, shard, unshard

__all__ = ["LAYOUTS", "positions", "ring_attention", "ring_attention_backward", "shard", "unshard"]

_NOT_BUILT = ("Grid", "attention", "compat", "pipeline", "tensor", "ulysses_attention")


def __getattr__(name: str) -> Any:
    """Say of announced names that they are not there yet."""
    if name in _NOT_BUILT:
        raise AttributeError(f"parallel.{name} is not built yet; there are {', '.join(__all__)}")
    raise AttributeError(f"module 'parallel' has no attribute {name!r}")
