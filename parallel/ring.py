"""How do P ranks attend over a sequence that none of them holds? Queries stay, keys and values travel round a ring.

Rank r begins with its own block of keys and values. At hop i it attends over the block of rank r - i and, meanwhile,
sends that block to rank r + 1 and receives the next one from rank r - 1:

    compute stream    own block   | block r-1  | block r-2  | ...  | round and write
    comm stream       send own    | send r-1   | send r-2   | ...
                      recv r-1    | recv r-2   | recv r-3   | ...

Two buffers suffice: a hop may receive once the block that lay there has been attended over (event compute -> comm), and
the next block is attended over once it has arrived (event comm -> compute). After P - 1 hops every query has seen every
key. Each rank sends (P - 1) blocks of 2 * batch * kv heads * tokens * dim elements, in one message per hop.

The online softmax is continued from block to block in the accumulation type and rounded once at the end, so the error
does not grow with the number of ranks. With `causal` a block that lies wholly in the future is passed on, not computed.

Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers (2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from device.array import DeviceArray
from device.dtypes import dtype, from_hccl
from device.kernels.attention import accumulation_type, attend_kernel, check_operands, finish_kernel
from hccl.errors import ArgumentError, DisagreementError, UnsupportedError
from parallel.sharding import LAYOUTS, check_layout, check_length, lengths, positions

if TYPE_CHECKING:
    from device import Device, Stream
    from hccl.communicator import Communicator


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    comm: Communicator,
    *,
    causal: bool = False,
    layout: str = "contiguous",
    scale: float | None = None,
    window: object = None,
    return_lse: bool = False,
    seq_len: int | None = None,
    stream: Stream | None = None,
) -> Any:
    """Compute attention of the whole sequence; every rank gives and gets its own shard.

    q: (batch, heads, tokens, dim); k, v: (batch, kv heads, tokens, dim): this rank's tokens as `parallel.shard` cuts
    them for `layout`, in float16, bfloat16, float32 or float64. Any whole length works: shards may differ in length
    and may be empty.
    causal: a token sees itself and the tokens before it in the whole sequence.
    seq_len: the whole length; when left out the ranks exchange lengths first, which makes the host wait.
    stream: where the computing is queued, default the device's default stream; the arguments must be ready on it. The
        transfers run on a stream of their own.

    Returns: out like q, or (out, lse) with lse (batch, heads, tokens), natural logarithm, float32 (float64 for float64
        inputs). ndarrays give ndarrays; `DeviceArray`s give `DeviceArray`s, which are there once `stream` is done.
    Raises: `ArgumentError` for arguments that do not fit; `DisagreementError` when ranks called with different ones;
        `UnsupportedError` for `window`, which is not built yet.

    >>> import hccl
    >>> from parallel import shard, unshard
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 7, 4))
    >>> def on_each_rank(comm):
    ...     mine = [shard(x, comm.rank, comm.size, axis=2, layout="zigzag") for x in (q, k, v)]
    ...     return ring_attention(*mine, comm, causal=True, layout="zigzag")
    >>> out = unshard(hccl.run(on_each_rank, ranks=3), axis=2, layout="zigzag")
    >>> from device.kernels import flash_attention
    >>> bool(np.allclose(out, flash_attention(q, k, v, causal=True), atol=1e-14))
    True
    """
    if window is not None:
        raise UnsupportedError(
            f"ring_attention: window={window!r} (sliding-window attention) is not built yet; pass None"
        )
    check_layout(layout)
    on_device = _on_device(q, k, v)
    check_operands("ring_attention", q, k, v)
    if k.shape[2] != q.shape[2]:
        raise ArgumentError(f"ring_attention: q has {q.shape[2]} tokens, k and v {k.shape[2]}; they must be equal")
    device = comm.device
    stream = device.default_stream if stream is None else stream
    if seq_len is None:
        seq_len = _agree(q, k, comm, causal, layout, scale, stream)
    held = lengths(seq_len, comm.size, layout)
    check_length("ring_attention", comm.rank, q.shape[2], held[comm.rank], seq_len, comm.size, layout)

    queries = q if on_device else device.array(q, stream=stream)
    kind = accumulation_type(q.dtype)
    state = [device.empty(shape, kind) for shape in (q.shape, q.shape[:3], q.shape[:3])]
    places = [positions(seq_len, rank, comm.size, layout) for rank in range(comm.size)]
    mine = places[comm.rank]
    fresh = True  # the own block comes first and no query is blind to it: it begins the softmax
    for owner, block in _rotate(_Packed(k, v, max(held), device, stream), held, comm, stream):
        theirs = places[owner]
        if not mine.size or not theirs.size or (causal and theirs[0] > mine[-1]):
            continue
        device.launch(
            attend_kernel,
            queries,
            block[0],
            block[1],
            *state,
            stream=stream,
            causal=causal,
            scale=scale,
            q_positions=mine,
            k_positions=theirs,
            fresh=fresh,
        )
        fresh = False
    out, lse = device.empty(q.shape, q.dtype), device.empty(q.shape[:3], kind)
    if mine.size:
        device.launch(finish_kernel, *state, out, lse, stream=stream)
    if not on_device:
        return (out.numpy(), lse.numpy()) if return_lse else out.numpy()
    return (out, lse) if return_lse else out


def ring_attention_backward(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: the backward pass is not built yet."""
    raise UnsupportedError("ring_attention_backward (the gradient of ring attention) is not built yet")


class _Packed:
    """Two buffers for a block of keys and values, k before v, each as large as the longest block."""

    def __init__(self, k: Any, v: Any, longest: int, device: Device, stream: Stream) -> None:
        batch, kv_heads, tokens, dim = k.shape
        self._shape = (2, batch, kv_heads, dim)
        self._buffers = [device.empty(longest * 2 * batch * kv_heads * dim, k.dtype) for _ in range(2)]
        for part, source in zip(self.block(0, tokens), (k, v), strict=True):
            if isinstance(source, DeviceArray):
                device.copy(source, part, stream=stream)
            else:
                part.copy_from(source)

    def block(self, hop: int, tokens: int) -> DeviceArray:
        """The block of hop `hop`, (2, batch, kv heads, tokens, dim); contiguous, so that it travels as one message."""
        two, batch, kv_heads, dim = self._shape
        buffer = self._buffers[hop % 2]
        return buffer[: two * batch * kv_heads * tokens * dim].reshape(two, batch, kv_heads, tokens, dim)


def _rotate(packed: _Packed, held: list[int], comm: Communicator, stream: Stream) -> Iterator[tuple[int, DeviceArray]]:
    """Yield (owner, block) for the blocks of all ranks: own first, then of rank - 1, rank - 2 …

    What the caller queues on `stream` before it asks for the next block may read the block; nothing later may.
    """
    rank, size = comm.rank, comm.size
    name = f"{comm.name} ring"  # one transfer stream for all calls on a communicator
    device = comm.device
    transfers = next((s for s in device.streams if s.name == name), None) or device.stream(name)
    transfers.wait(stream.record())  # the own block is packed on `stream`
    for hop in range(size):
        owner, coming = (rank - hop) % size, (rank - hop - 1) % size
        block = packed.block(hop, held[owner])
        items = []
        if hop + 1 < size and held[owner]:
            items.append(("send", block, (rank + 1) % size))
        if hop + 1 < size and held[coming]:
            items.append(("recv", packed.block(hop + 1, held[coming]), (rank - 1) % size))
        if items:
            comm.batch_send_recv(items, stream=transfers)
        arrived = transfers.record()
        yield owner, block
        transfers.wait(stream.record())  # the next transfer overwrites this block
        stream.wait(arrived)


def _on_device(*arrays: Any) -> bool:
    """Tell whether all are `DeviceArray`s, or all host arrays."""
    kinds = {isinstance(x, DeviceArray) for x in arrays}
    if len(kinds) > 1:
        raise ArgumentError("ring_attention: q, k, v are partly in host, partly in device memory")
    return kinds.pop()


_NAMES = ("tokens", "batch", "heads", "kv heads", "dim", "element type", "causal", "layout", "scale")


def _agree(q: Any, k: Any, comm: Communicator, causal: bool, layout: str, scale: float | None, stream: Stream) -> int:
    """Exchange what every rank must know or have in common; return the whole length."""
    batch, heads, tokens, dim = q.shape
    bits = np.float64(np.nan if scale is None else scale).view(np.int64)
    kind, style = dtype(q.dtype).hccl, list(LAYOUTS).index(layout)
    mine = np.array([[tokens, batch, heads, k.shape[1], dim, kind, causal, style, bits]], np.int64)
    table = comm.all_gather(comm.device.array(mine, stream=stream), stream=stream).numpy()
    for rank in range(comm.size):
        for column, name in enumerate(_NAMES):
            if column and table[rank, column] != table[0, column]:
                raise DisagreementError(
                    f"ring_attention: {name} of rank {rank} is {_spell(name, table[rank, column])}, "
                    f"of rank 0 {_spell(name, table[0, column])}"
                )
    total = int(table[:, 0].sum())
    for rank, expected in enumerate(lengths(total, comm.size, layout)):
        check_length("ring_attention", rank, int(table[rank, 0]), expected, total, comm.size, layout)
    return total


def _spell(name: str, value: np.int64) -> str:
    if name == "element type":
        return from_hccl(int(value)).name
    if name == "layout":
        return list(LAYOUTS)[value]
    if name == "scale":
        return str(value.view(np.float64)) if not np.isnan(value.view(np.float64)) else "left out"
    return str(bool(value) if name == "causal" else value)
