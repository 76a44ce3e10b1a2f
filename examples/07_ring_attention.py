"""Attention over a sequence that no rank holds: the queries stay, keys and values travel round the ring.

Run: python launch.py -n 4 examples/07_ring_attention.py
"""

import numpy as np

import hccl
from device.kernels import flash_attention
from parallel import positions, ring_attention, shard, unshard

TOKENS, HEADS, DIM = 37, 4, 16  # any length will do

# The same seed everywhere, so that each rank can cut its shard out of the same whole: (batch, heads, tokens, dim).
q, k, v = np.random.default_rng(7).standard_normal((3, 1, HEADS, TOKENS, DIM), dtype=np.float32)

with hccl.init() as comm:
    for layout in ("contiguous", "zigzag", "striped"):
        mine = [shard(x, comm.rank, comm.size, axis=2, layout=layout) for x in (q, k, v)]
        out = ring_attention(*mine, comm, causal=True, layout=layout)

        # To compare, bring all shards to every rank. They differ in length: pad, gather, cut.
        lengths = [len(positions(TOKENS, rank, comm.size, layout)) for rank in range(comm.size)]
        padded = np.zeros((max(lengths), HEADS, DIM), np.float32)
        padded[: out.shape[2]] = out[0].swapaxes(0, 1)
        parts = np.split(comm.all_gather(comm.device.array(padded)).numpy(), comm.size)
        whole = unshard([part[:n] for part, n in zip(parts, lengths, strict=True)], 0, layout).swapaxes(0, 1)

        # One device, double precision, the whole sequence.
        exact = flash_attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
        error = np.abs(whole - exact[0]).max()
        if comm.rank == 0:
            print(f"{layout:<10} tokens per rank {lengths}, error below 2e-6: {bool(error < 2e-6)}")
