"""Attention against PyTorch, which shares no code and no author with ours. Skipped where torch is not installed."""

import numpy as np
import pytest

import hccl
from device.kernels import flash_attention
from parallel import ring_attention, shard, unshard

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")


def operands(q_shape, kv_shape, dtype=np.float64):
    random = np.random.default_rng(7)
    return [random.standard_normal(shape).astype(dtype) for shape in (q_shape, kv_shape, kv_shape)]


def by_torch(q, k, v, causal, scale=None):
    """PyTorch's scaled_dot_product_attention with an explicit mask, causal from the bottom right."""
    mask = None
    if causal:
        q_len, k_len = q.shape[2], k.shape[2]
        mask = torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)
    q, k, v = (torch.from_numpy(np.ascontiguousarray(x)) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).numpy()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("q_shape", "kv_shape"),
    [
        ((1, 1, 1, 8), (1, 1, 1, 8)),
        ((2, 4, 31, 16), (2, 2, 31, 16)),
        ((1, 6, 97, 24), (1, 3, 97, 24)),
        ((1, 2, 5, 64), (1, 1, 300, 64)),
        ((1, 2, 600, 32), (1, 2, 600, 32)),
    ],
)
def test_flash_attention_equals_torch_in_float64(q_shape, kv_shape, causal):
    q, k, v = operands(q_shape, kv_shape)
    assert np.abs(flash_attention(q, k, v, causal=causal) - by_torch(q, k, v, causal)).max() < 1e-12


def test_flash_attention_in_float32_is_as_exact_as_torch():
    q, k, v = operands((1, 4, 512, 64), (1, 4, 512, 64), np.float32)
    exact = by_torch(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    ours = np.abs(flash_attention(q, k, v, causal=True) - exact).max()
    theirs = np.abs(by_torch(q, k, v, causal=True) - exact).max()
    assert ours <= max(2 * theirs, 1e-6)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_ring_attention_equals_torch_in_float64(ranks, layout):
    q, k, v = operands((2, 4, 31, 8), (2, 2, 31, 8))

    def work(comm):
        parts = [shard(x, comm.rank, comm.size, 2, layout) for x in (q, k, v)]
        return ring_attention(*parts, comm, causal=True, layout=layout)

    out = unshard(hccl.run(work, ranks), 2, layout)
    assert np.abs(out - by_torch(q, k, v, causal=True)).max() < 1e-12


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_all_reduce_of_two_ranks_equals_torch_arithmetic_to_the_bit(op):
    """Two terms: no order and no wider accumulation to differ in."""
    random = np.random.default_rng(1)
    a, b = (random.standard_normal(1000).astype(np.float32) for _ in range(2))
    x, y = torch.from_numpy(a), torch.from_numpy(b)
    expected = {"sum": x + y, "prod": x * y, "max": torch.maximum(x, y), "min": torch.minimum(x, y)}[op].numpy()
    results = hccl.run(lambda comm: comm.all_reduce(comm.device.array((a, b)[comm.rank]), op=op).numpy(), 2)
    assert all(np.array_equal(result, expected) for result in results)
