import gc

import numpy as np
import pytest

from device import ArgumentError, ClosedError, Device, IllegalAddressError
from device.dtypes import TABLE
from device.kernels import add, fill


@pytest.mark.parametrize("entry", TABLE, ids=str)
def test_host_data_of_every_type_comes_back_unchanged(npu, entry):
    host = np.arange(6).astype(entry.numpy).reshape(2, 3)
    x = npu.array(host)
    assert (x.shape, x.dtype, x.ndim, x.size, x.nbytes) == ((2, 3), entry.numpy, 2, 6, 6 * entry.size)
    back = x.numpy()
    assert back.tobytes() == host.tobytes()
    back[0] = 0
    assert x.numpy().tobytes() == host.tobytes(), "numpy() is a copy"


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_shapes_without_axes_and_without_elements_work(npu, shape):
    x = npu.array(np.ones(shape, np.int16))
    assert x.shape == shape
    assert x.numpy().tolist() == np.ones(shape, np.int16).tolist()


def test_array_takes_lists_buffers_strided_and_byte_swapped_data(npu):
    assert npu.array([[1, 2], [3, 4]]).numpy().tolist() == [[1, 2], [3, 4]]
    for text in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
        assert npu.array(text).dtype == np.uint8
        assert npu.array(text).numpy().tolist() == [97, 98, 99]
    assert npu.array(np.arange(6)[::2]).numpy().tolist() == [0, 2, 4]
    assert npu.array(np.arange(6).reshape(2, 3).T).numpy().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert npu.array(np.array([1, 2], ">i4")).numpy().tolist() == [1, 2]
    assert npu.array([1.5, 2.5], "float16").dtype == np.float16


def test_types_that_an_npu_does_not_have_are_refused(npu):
    with pytest.raises(ArgumentError, match="'object' does not exist on this NPU"):
        npu.array([object()])
    with pytest.raises(ArgumentError, match="'float33' is not an element type"):
        npu.empty(3, "float33")


def test_the_signature_tells_calls_apart(npu):
    x = npu.zeros((4, 2), "float32")
    assert x._sig == (x.address, 8, 4)
    assert x[1]._sig == (x.address + 8, 2, 4)
    assert npu.zeros(3, bool)._sig[2] == -1


# ---------------------------------------------------------------------------------------------------------------- views
def test_indexing_gives_views_with_their_own_address(npu):
    x = npu.array(np.arange(24, dtype=np.int32).reshape(4, 6))
    assert x[1].address == x.address + 24
    assert x[1, 2].shape == ()
    assert int(x[1, 2].numpy()) == 8
    assert x[-1, ::2].numpy().tolist() == [18, 20, 22]
    assert x[..., 5].numpy().tolist() == [5, 11, 17, 23]
    assert x[None, 2:].shape == (1, 2, 6)
    assert x[::-1].address == x.address + 3 * 24
    assert x[np.int64(2)].address == x.address + 48
    assert x[4:].shape == (0, 6)
    assert [row.numpy()[0] for row in x] == [0, 6, 12, 18]
    assert len(x) == 4


def test_writing_through_a_view_shows_in_the_whole(npu):
    x = npu.zeros((2, 3), "int32")
    x[1] = [1, 2, 3]
    x[0, 1] = 9
    x[:, 2:] = 7
    assert x.numpy().tolist() == [[0, 9, 7], [1, 2, 7]]
    x[...] = 5
    assert x.numpy().tolist() == [[5] * 3] * 2
    x[0] = x[1].copy_from(np.array([1, 2, 3], np.int32))
    assert x.numpy().tolist() == [[1, 2, 3]] * 2


def test_reshape_is_a_view_of_contiguous_memory(npu):
    x = npu.array(np.arange(6))
    y = x.reshape(2, 3)
    assert y.address == x.address
    assert x.reshape((3, -1)).shape == (3, 2)
    y[0, 0] = 100
    assert x.numpy()[0] == 100
    with pytest.raises(ArgumentError, match=r"cannot reshape \(6,\) \(6 elements\) into \(4, 2\)"):
        x.reshape(4, 2)
    assert not y[:, 1].contiguous
    assert y[:, :1].numpy().tolist() == [[100], [3]]
    with pytest.raises(
        ArgumentError, match=r"reshape needs a contiguous array; this view of shape \(2,\) has element strides \(3,\)"
    ):
        y[:, 1].reshape(1, 2)


def test_indexing_that_would_copy_is_refused(npu):
    x = npu.zeros(4)
    for key in ([0, 1], np.array([True, False, True, False]), True, "a"):
        with pytest.raises(ArgumentError, match="indexing by lists, masks or arrays"):
            x[key]
    with pytest.raises(IndexError):
        x[4]


def test_numpy_sees_a_copy_when_asked_and_never_computes_unseen(npu):
    x = npu.array([1.0, 2.0])
    assert np.asarray(x).tolist() == [1.0, 2.0]
    assert np.asarray(x, dtype=np.int32).tolist() == [1, 2]
    with pytest.raises(TypeError):
        np.ones(2) + x
    with pytest.raises(ValueError, match="without a copy"):
        np.array(x, copy=False)
    with pytest.raises(TypeError, match="without axes has no length"):
        len(npu.zeros(()))


# --------------------------------------------------------------------------------------------------------------- copies
def test_copies_between_host_and_device_check_shape_and_type(npu):
    x = npu.zeros((2, 2), "float32")
    with pytest.raises(ArgumentError, match=r"expected shape \(2, 2\) float32, got shape \(2,\) float32"):
        x.copy_from(np.zeros(2, np.float32))
    with pytest.raises(
        ArgumentError,
        match=r"expected shape \(2, 2\) float32, got shape \(2, 2\) float64; a copy to the device does not",
    ):
        x.copy_from(np.zeros((2, 2)))
    with pytest.raises(ArgumentError, match=r"copy_from: expected shape \(2, 2\) float32, got shape \(\) <U8"):
        x.copy_from("nonsense")
    with pytest.raises(ArgumentError, match=r"cannot take 1000 as int8"):
        npu.zeros(1, "int8")[0] = 1000
    out = np.empty((2, 2), np.float32)
    assert x.copy_from([[1, 2], [3, 4]]).copy_to(out) is out
    assert out.tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ArgumentError, match=r"copy_to: expected a host array of shape \(2, 2\) float32, got 'list'"):
        x.copy_to([0])


def test_numpy_waits_for_every_stream_that_writes_the_array(npu):
    x = npu.zeros(4, "int32")
    one, two = npu.stream(), npu.stream()
    npu.launch(fill, 1, out=x[:2], stream=one)
    npu.launch(fill, 2, out=x[2:], stream=two)
    assert x._writer is two
    assert x.numpy().tolist() == [1, 1, 2, 2]
    assert x._writer is None


def test_copy_from_waits_for_readers_so_that_they_see_the_old_content(npu):
    x, y = npu.array([1.0, 2.0]), npu.zeros(2, "float64")
    npu.launch(add, x, x, out=y)
    x.copy_from([10.0, 20.0])
    assert y.numpy().tolist() == [2.0, 4.0]
    x._reader = npu.default_stream
    assert x._reader is npu.default_stream
    x.copy_from([0.0, 0.0])
    assert x._reader is None


def test_a_device_array_is_copied_behind_whatever_writes_it(npu):
    x, y = npu.zeros(3), npu.zeros(3)
    side = npu.stream()
    npu.launch(fill, 4, out=x, stream=side)
    y[...] = x
    assert y.numpy().tolist() == [4, 4, 4]
    with pytest.raises(ArgumentError, match=r"copy: expected shape \(3,\) float32, got \(2,\) float32"):
        y.copy_from(x[:2])
    with Device(1) as other, pytest.raises(IllegalAddressError, match=r"device 0: wrong device: copy: .* device 1"):
        y.copy_from(other.zeros(3))


# ------------------------------------------------------------------------------------------------------------- lifetime
def test_memory_goes_with_the_last_view(any_npu):
    before = any_npu.memory_info().free
    x = any_npu.zeros(1000)
    tail = x[500:]
    del x
    gc.collect()
    assert any_npu.memory_info().free < before
    assert tail.numpy().tolist() == [0.0] * 500
    del tail
    gc.collect()
    assert any_npu.memory_info().free == before


def test_a_queued_task_keeps_its_arrays(npu):
    y = npu.zeros(4)
    npu.launch(add, npu.array(np.ones(4, np.float32)), npu.array(np.ones(4, np.float32)), out=y)
    gc.collect()
    assert y.numpy().tolist() == [2.0] * 4


def test_zeros_are_zero_in_used_memory_too():
    with Device(check="off") as npu:
        npu.array(np.full(1000, 7.0)).free()
        x = npu.zeros(1000, "float64")
        assert not x._alloc.fresh
        assert not x.numpy().any()


def test_strict_mode_makes_unwritten_elements_nan(npu):
    assert np.isnan(npu.empty(10).numpy()).all()
    x = npu.zeros(8)
    view = x._np
    x.free()
    assert np.isnan(view).all()


def test_every_use_after_free_is_refused_with_both_lines(npu):
    x = npu.zeros(4)
    part = x[:2]
    x.free()
    assert x.freed
    assert part.freed
    assert "freed" in repr(x)
    for use in (
        x.numpy,
        part.numpy,
        lambda: x.copy_from([0] * 4),
        lambda: x[0],
        lambda: x.reshape(2, 2),
        lambda: npu.launch(fill, 0, out=x),
    ):
        with pytest.raises(
            IllegalAddressError,
            match=r"^device 0: use after free: address 0x\w+ \(16 bytes\) was freed at .*test_array\.py:\d+, "
            r"allocated at .*test_array\.py:\d+$",
        ):
            use()
    with pytest.raises(IllegalAddressError, match="double free"):
        x.free()


def test_a_task_that_was_queued_before_the_free_fails_when_it_runs():
    npu = Device(check="strict")
    x = npu.zeros(4)
    npu.launch(fill, 1, out=x)
    x.free()
    with pytest.raises(IllegalAddressError, match="use after free"):
        npu.close()


def test_an_address_whose_array_was_collected_says_so(npu):
    address = npu.zeros(4).address
    gc.collect()
    with pytest.raises(IllegalAddressError, match=r"was freed with its last array, allocated at .*test_array\.py"):
        npu.resolve(address, 4)


def test_only_the_whole_array_can_be_freed(npu):
    x = npu.zeros(4)
    with pytest.raises(ArgumentError, match="view of a part of an array: free the whole"):
        x[:2].free()
    x.reshape(2, 2).free()
    assert x.freed


def test_after_close_an_array_says_closed():
    with Device() as npu:
        x = npu.zeros(4)
    with pytest.raises(ClosedError, match=r"device 0: closed: address .* \(16 bytes\) allocated at"):
        x.numpy()


# -------------------------------------------------------------------------------------------------------------- buffers
def test_a_buffer_is_bytes_that_can_be_viewed_as_any_type(npu):
    with npu.malloc(1024) as buffer:
        assert buffer.view("uint8").size == 1024
        x = buffer.view(np.float32, (2, 3), offset=64)
        assert x.address == buffer.address + 64
        x.copy_from(np.ones((2, 3), np.float32))
        assert npu.resolve(buffer.address + 64, 4).view(np.float32)[0] == 1.0
        assert buffer.view("bf16", 5).shape == (5,)
        with pytest.raises(ArgumentError, match="free: this array is a view of a Buffer: free that"):
            x.free()
    with pytest.raises(IllegalAddressError, match="use after free"):
        x.numpy()
    with pytest.raises(IllegalAddressError, match="use after free"):
        buffer.view("uint8")
    with pytest.raises(IllegalAddressError, match=r"double free: address 0x\w+ \(1024 bytes\) was freed at"):
        buffer.free()


def test_views_that_do_not_fit_a_buffer_are_refused(npu):
    with npu.malloc(10) as buffer:
        with pytest.raises(
            ArgumentError, match=r"view of \(3,\) float32 from byte 0 needs 12 bytes, the buffer has 10"
        ):
            buffer.view("float32", 3)
        with pytest.raises(ArgumentError, match="10 bytes are not a whole number of float32"):
            buffer.view("float32")
        with pytest.raises(ArgumentError, match="cannot start at byte 3 of a 10-byte buffer"):
            buffer.view("int16", 1, offset=3)
        with pytest.raises(ArgumentError, match=r"integers >= 0, got \(-1,\)"):
            buffer.view("int8", -1)
