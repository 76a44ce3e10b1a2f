import subprocess
import sys

import numpy as np
import pytest

from device import ArgumentError, dtype
from device.dtypes import TABLE, from_acl, from_hccl


@pytest.mark.parametrize(
    ("name", "hccl", "acl"),
    [
        ("int8", 0, 2),
        ("int16", 1, 6),
        ("int32", 2, 3),
        ("float16", 3, 1),
        ("float32", 4, 0),
        ("int64", 5, 9),
        ("uint64", 6, 10),
        ("uint8", 7, 4),
        ("uint16", 8, 7),
        ("uint32", 9, 8),
        ("float64", 10, 11),
        ("bfloat16", 11, 27),
    ],
)
def test_every_type_has_the_vendors_numbers(name, hccl, acl):
    entry = dtype(name)
    assert (entry.name, entry.hccl, entry.acl) == (name, hccl, acl)
    assert from_hccl(hccl) is entry
    assert from_acl(acl) is entry


@pytest.mark.parametrize("entry", TABLE, ids=str)
def test_sizes_agree_with_numpy_and_every_spelling_finds_the_same_entry(entry):
    assert entry.numpy.itemsize == entry.size
    for spelling in (entry, entry.name, *entry.aliases, entry.numpy, entry.numpy.type):
        assert dtype(spelling) is entry


def test_halves_are_summed_in_float32_and_everything_else_in_itself():
    assert dtype("fp16").accumulate == np.float32
    assert dtype("bf16").accumulate == np.float32
    assert dtype("fp64").accumulate == np.float64
    assert dtype("int8").accumulate == np.int8


def test_a_number_is_refused_because_acl_and_hccl_count_differently():
    with pytest.raises(ArgumentError, match="4 is not an element type"):
        dtype(4)
    with pytest.raises(ArgumentError, match="None is not an element type"):
        dtype(None)


def test_unknown_types_are_refused_with_the_known_ones():
    with pytest.raises(ArgumentError, match=r"'float33' is not an element type; known are int8, int16"):
        dtype("float33")
    with pytest.raises(ArgumentError, match="'str32' does not exist on this NPU"):
        dtype("U1")
    with pytest.raises(ArgumentError, match="other byte order"):
        dtype(np.dtype("f4").newbyteorder())
    with pytest.raises(ArgumentError, match=r"HcclDataType 14 is not supported; known are 0 \(int8\)"):
        from_hccl(14)
    with pytest.raises(ArgumentError, match="aclDataType -1 is not supported"):
        from_acl(-1)


def test_importing_device_loads_neither_ml_dtypes_nor_numba_nor_mpi():
    code = "import device, sys; print([m for m in ('ml_dtypes', 'numba', 'mpi4py', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
