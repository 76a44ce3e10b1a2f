import numpy as np
import pytest

from device import ArgumentError
from device.kernels import Cost, add, cast, copy, fill, matmul, scale
from device.kernels import elementwise as module

TYPES = ["int8", "int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64"]


def run(kernel, *args, **kwargs):
    """Run to the end; return how often the kernel let others go first."""
    work = kernel.run(*args, **kwargs)
    return 0 if work is None else sum(1 for _ in work)


def small(name, n=6):
    from device import dtype

    return np.arange(n).astype(dtype(name).numpy)


@pytest.mark.parametrize("name", TYPES)
def test_every_kernel_computes_every_type_exactly_on_small_numbers(name):
    x, out = small(name), np.empty_like(small(name))
    run(copy, x, out=out)
    assert out.tolist() == [0, 1, 2, 3, 4, 5]
    run(add, x, x, out=out)
    assert out.tolist() == [0, 2, 4, 6, 8, 10]
    run(scale, x, 3, out=out)
    assert out.tolist() == [0, 3, 6, 9, 12, 15]
    run(fill, 7, out=out)
    assert out.tolist() == [7] * 6
    product = np.empty((2, 2), x.dtype)
    run(matmul, x.reshape(2, 3), x.reshape(3, 2), out=product)
    assert product.tolist() == [[10, 13], [28, 40]]


def test_cast_rounds_as_numpy_does():
    out = np.empty(3, np.float16)
    run(cast, np.array([1.0, 65504.0, 1 / 3]), out=out)
    assert out.tolist() == np.array([1.0, 65504.0, 1 / 3]).astype(np.float16).tolist()


def test_halves_are_multiplied_and_summed_in_float32():
    ones = np.ones((1, 4096), np.float16)
    out = np.empty((1, 1), np.float16)
    run(matmul, ones, ones.reshape(4096, 1), out=out)
    assert out[0, 0] == 4096  # a float16 running sum would stop at 2048


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 25])
def test_large_arrays_are_done_in_tiles_that_cover_everything_once(n, monkeypatch):
    monkeypatch.setattr(module, "_TILE", 8)
    x = np.arange(n, dtype=np.float32)
    turns = run(add, x, x, out=x)
    assert x.tolist() == [2.0 * i for i in range(n)]
    assert turns == (0 if n <= 8 else -(-n // 8))


def test_a_shifted_overlap_is_not_done_in_tiles(monkeypatch):
    monkeypatch.setattr(module, "_TILE", 4)
    memory = np.arange(20.0)
    assert run(copy, memory[:-1], out=memory[1:]) == 0
    assert memory.tolist() == [0.0, *range(19)]


def test_views_with_gaps_are_allowed():
    grid = np.zeros((4, 4))
    run(fill, 1.0, out=grid[::2, 1:3])
    assert grid.sum() == 4


def test_matmul_takes_batches_and_yields_between_row_blocks(monkeypatch):
    monkeypatch.setattr(module, "_ROWS", 2)
    rng = np.random.default_rng(0)
    x, y = rng.integers(-5, 5, (3, 5, 4)).astype(float), rng.integers(-5, 5, (4, 2)).astype(float)
    out = np.empty((3, 5, 2))
    assert run(matmul, x, y, out=out) == 3
    np.testing.assert_array_equal(out, x @ y)


def test_operands_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ArgumentError, match=r"add: operands differ: \(3,\) float64 and \(4,\) float64"):
        run(add, np.zeros(3), np.zeros(4), out=np.zeros(3))
    with pytest.raises(ArgumentError, match=r"copy: operands differ: \(3,\) float64 and \(3,\) float32"):
        run(copy, np.zeros(3), out=np.zeros(3, np.float32))
    with pytest.raises(ArgumentError, match=r"matmul: inner sizes differ: \(2, 3\) and \(2, 3\)"):
        run(matmul, np.zeros((2, 3)), np.zeros((2, 3)), out=np.zeros((2, 3)))
    with pytest.raises(ArgumentError, match=r"does not go into \(3, 3\) float64"):
        run(matmul, np.zeros((2, 3)), np.zeros((3, 2)), out=np.zeros((3, 3)))
    square = np.zeros((2, 2))
    with pytest.raises(ArgumentError, match="the output overlaps an input"):
        run(matmul, square, square, out=square)


def test_costs_count_operations_and_traffic():
    x = np.zeros(10, np.float32)
    assert copy.cost(x, out=x) == Cost(0, 80, "vector", 4)
    assert fill.cost(0.0, out=x) == Cost(0, 40, "vector", 4)
    assert add.cost(x, x, out=x) == Cost(10, 120, "vector", 4)
    assert scale.cost(x, 2.0, out=x) == Cost(10, 80, "vector", 4)
    assert cast.cost(x, out=x.astype(np.float16)) == Cost(10, 60, "vector", 4)
    a, b = np.zeros((2, 3), np.float16), np.zeros((3, 5), np.float16)
    assert matmul.cost(a, b, out=np.zeros((2, 5), np.float16)) == Cost(60, 2 * (6 + 15 + 10), "cube", 2)


def test_attention_is_loaded_when_it_is_asked_for():
    import device.kernels as kernels

    assert callable(kernels.flash_attention)
    assert kernels.flash_attention_kernel.name == "flash_attention"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kernels.nothing
