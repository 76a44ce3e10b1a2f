"""Models of parallelism over `hccl` communicators. Start with `shard`, `ring_attention`, `unshard`."""

from parallel.ring import ring_attention, ring_attention_backward
from parallel.sharding import LAYOUTS, positions, shard, unshard

__all__ = ["LAYOUTS", "positions", "ring_attention", "ring_attention_backward", "shard", "unshard"]
