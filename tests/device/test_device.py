import contextlib
import re
import warnings

import numpy as np
import pytest

from device import (
    ArgumentError,
    ClosedError,
    Cost,
    Device,
    IllegalAddressError,
    Kernel,
    LeakWarning,
    OutOfMemoryError,
    Timeline,
)
from device import errors as device_errors
from device.kernels import add, copy, fill
from device.memory import base_address


def leaks_of(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [w for w in caught if issubclass(w.category, LeakWarning)]


# --------------------------------------------------------------------------------------------------------------- errors
def test_every_error_is_a_device_error_with_a_vendor_code():
    for name, code in [
        ("ArgumentError", 107000),
        ("IllegalAddressError", 107000),
        ("OutOfMemoryError", 207001),
        ("ClosedError", 107002),
        ("TimeoutError", 107020),
    ]:
        kind = getattr(device_errors, name)
        assert issubclass(kind, device_errors.DeviceError)
        assert kind("x").code == code
    assert issubclass(ArgumentError, ValueError)
    assert isinstance(device_errors.TimeoutError("x"), TimeoutError)


# -------------------------------------------------------------------------------------------------------------- options
def test_options_that_do_not_exist_are_refused_with_those_that_do():
    for option, message in [
        ({"check": "lax"}, "check is one of 'default', 'strict', 'off', got 'lax'"),
        ({"progress": "fast"}, "progress is one of 'thread', 'inline', got 'fast'"),
        ({"order": "random"}, "order is one of 'eager', 'lazy', got 'random'"),
        ({"spec": "h100"}, "no chip is called 'h100'"),
        ({"id": -1}, "not negative, got -1"),
        ({"ordinal": 1 << 20}, "ordinal lies in"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            Device(**option)


def test_the_environment_chooses_the_checks_when_the_program_does_not(monkeypatch):
    monkeypatch.setenv("HCCL_CHECK", "strict")
    with Device() as npu:
        assert (npu.check, npu.order) == ("strict", "lazy")
    with Device(check="default", order="lazy") as npu:
        assert (npu.check, npu.order) == ("default", "lazy")
    monkeypatch.delenv("HCCL_CHECK")
    with Device() as npu:
        assert (npu.check, npu.order) == ("default", "eager")


def test_the_ordinal_decides_the_address_range():
    with Device(1, ordinal=7) as npu, npu.malloc(8) as buffer:
        assert buffer.address == base_address(7)
        assert "device 1" in repr(npu).lower()


def test_memory_info_counts_what_is_free():
    with Device() as npu:
        assert npu.memory_info().total == npu.memory_info().free == 64 << 30
        with npu.malloc(1000):
            free, total = npu.memory_info()
            assert total - free == 1024


def test_a_device_has_the_memory_of_its_chip_and_no_more():
    with Device(spec="910b4") as npu:
        assert npu.memory_info().total == 32 << 30
        with pytest.raises(OutOfMemoryError, match=r"device 0: out of memory: 34359738369 bytes asked for"):
            npu.malloc((32 << 30) + 1)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_malloc_of_nothing_is_refused_with_the_vendors_code(npu, nbytes):
    with pytest.raises(ArgumentError, match=f"malloc of {nbytes} bytes") as caught:
        npu.malloc(nbytes)
    assert caught.value.code == 100000


@pytest.mark.parametrize("shape", [(-1,), (2, -3), 1.5, (2, "a"), None])
def test_shapes_are_integers_that_are_not_negative(npu, shape):
    with pytest.raises(ArgumentError, match="a shape consists of integers >= 0"):
        npu.empty(shape)


def test_shapes_may_be_numbers_lists_and_numpy_integers(npu):
    assert npu.empty(3).shape == (3,)
    assert npu.empty([2, np.int64(3)]).shape == (2, 3)
    assert npu.empty(()).shape == ()


# --------------------------------------------------------------------------------------------------------------- launch
def test_a_kernel_runs_in_stream_order_and_returns_nothing(any_npu):
    x = any_npu.zeros(4)
    assert any_npu.launch(fill, 3, out=x) is None
    any_npu.launch(add, x, x, out=x)
    any_npu.launch(add, x, x, out=x)
    assert x.numpy().tolist() == [12.0] * 4


def test_host_memory_buffers_and_foreign_arrays_are_refused_as_operands(npu):
    x = npu.zeros(4)
    with pytest.raises(
        IllegalAddressError,
        match=r"illegal memory access: copy: an operand of shape \(4,\) float32 lies in host memory",
    ):
        npu.launch(copy, np.zeros(4, np.float32), out=x)
    with pytest.raises(IllegalAddressError, match="lies in host memory"):
        npu.launch(copy, x, out=np.zeros(4, np.float32))
    with npu.malloc(16) as buffer, pytest.raises(ArgumentError, match=r"a Buffer has no type; pass buffer\.view"):
        npu.launch(copy, buffer, out=x)
    with Device(5) as other:
        with pytest.raises(
            IllegalAddressError, match=r"device 0: wrong device: copy: address 0x\w+ belongs to device 5"
        ):
            npu.launch(copy, other.zeros(4), out=x)
        with pytest.raises(ArgumentError, match="device 0: launch of fill on default of device 5"):
            npu.launch(fill, 0, out=x, stream=other.default_stream)


def test_a_kernel_that_yields_lets_other_streams_go_first():
    seen = []

    def steps(name, out):
        for i in range(3):
            seen.append(f"{name}{i}")
            yield None
        out.fill(1)

    kernel = Kernel("steps", steps, lambda name, out: Cost(0, 0))
    with Device(order="lazy") as npu:
        x, side = npu.zeros(1), npu.stream()
        npu.launch(kernel, "a", x)
        npu.launch(kernel, "b", x, stream=side)
        npu.default_stream.wait(side.record())
        npu.synchronize()
        assert sorted(seen) == ["a0", "a1", "a2", "b0", "b1", "b2"]
        assert seen.index("b0") < 5
        assert x.numpy()[0] == 1


def test_the_error_of_a_kernel_is_raised_at_the_next_touch_and_stays():
    npu = Device(progress="inline", order="lazy")
    x = npu.zeros(4)
    npu.launch(add, x, x[:2], out=x)
    npu.launch(fill, 1, out=x)
    for touch in (x.numpy, npu.synchronize, lambda: npu.launch(fill, 1, out=x), npu.close):
        with pytest.raises(ArgumentError, match="add: operands differ"):
            touch()
    assert npu.closed


def test_overflow_is_silent_as_on_a_chip(npu):
    x = npu.array(np.array([65504.0], np.float16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        npu.launch(add, x, x, out=x)
        assert np.isinf(x.numpy()).all()


# --------------------------------------------------------------------------------------------------------- virtual time
def test_a_launch_takes_the_roofline_time_of_its_cost(npu):
    stream = npu.stream()
    x = npu.zeros((4, 4))
    kernel = Kernel("second", lambda out: None, lambda out: Cost(0, npu.spec.hbm_bytes_per_s))
    npu.launch(kernel, x, stream=stream)
    stream.synchronize()
    assert stream.now_s == stream.compute_s == 1.0 + npu.spec.launch_s


def test_host_copies_are_charged_to_the_default_stream_or_the_one_that_wrote(npu):
    spec, default, side = npu.spec, npu.default_stream, npu.stream()
    x = npu.array(np.zeros(1000, np.float32))
    assert default.now_s == default.copy_s == spec.host_copy_s(4000, True)
    npu.array(np.zeros(10, np.float32), stream=side)
    assert side.copy_s == spec.host_copy_s(40, True)
    npu.launch(fill, 1, out=x, stream=side)
    x.numpy()
    assert side.copy_s == spec.host_copy_s(40, True) + spec.host_copy_s(4000, False)
    assert default.copy_s == spec.host_copy_s(4000, True)


def test_a_host_copy_is_charged_behind_what_is_queued(npu):
    kernel = Kernel("work", lambda out: None, lambda out: Cost(0, 1.6e9))
    x = npu.zeros(1)
    npu.launch(kernel, x)
    npu.array([1.0])
    assert npu.default_stream.now_s == 0.0, "lazy: nothing ran yet"
    npu.synchronize()
    expected = npu.spec.time_s(Cost(0, 1.6e9)) + npu.spec.host_copy_s(8, True)
    assert npu.default_stream.now_s == pytest.approx(expected, rel=1e-15)


def test_numpy_takes_the_time_of_the_latest_writer():
    kernel = Kernel("work", lambda s, out: None, lambda s, out: Cost(0, s * 1.6e12))
    with Device(timeline=Timeline(), check="strict") as npu:
        x, slow, fast = npu.zeros(2), npu.stream("slow"), npu.stream("fast")
        npu.launch(kernel, 2.0, x[:1], stream=slow)
        npu.launch(kernel, 1.0, x[1:], stream=fast)
        x.numpy()
        after = 2.0 + npu.spec.launch_s + npu.spec.host_copy_s(8, False)
        assert fast.now_s == pytest.approx(after, rel=1e-12)
        assert fast.wait_s == pytest.approx(1.0, rel=1e-12)


# -------------------------------------------------------------------------------------------------------------- streams
def test_streams_are_numbered_named_and_released(npu):
    one, two = npu.stream(), npu.stream("copies")
    assert [s.name for s in npu.streams] == ["default", "stream 1", "copies"]
    npu.release_stream(one)
    assert npu.streams == (npu.default_stream, two)
    assert npu.stream().index == 3
    with pytest.raises(ArgumentError, match="default is the default stream and cannot be released"):
        npu.release_stream(npu.default_stream)
    with pytest.raises(ArgumentError, match="stream 1 is not a stream of this device"):
        npu.release_stream(one)


def test_an_event_is_made_by_the_device_and_recorded_by_a_stream(npu):
    event = npu.event()
    x = npu.zeros(4)
    npu.launch(fill, 1, out=x)
    assert npu.default_stream.record(event) is event
    event.synchronize()
    assert event.done
    assert event.time_s == npu.default_stream.now_s


# ---------------------------------------------------------------------------------------------------------------- close
def test_a_buffer_that_was_not_freed_is_reported_with_its_line_and_its_bytes():
    def leak():
        with Device(3) as npu:
            for _ in range(3):
                npu.malloc(1000)
            npu.malloc(24)
            npu.malloc(512).free()
            npu.zeros(100)

    many, one = leaks_of(leak)
    assert re.fullmatch(
        r"device 3: leak: 3 buffers \(3000 bytes\) allocated at \S*test_device\.py:\d+ were never freed",
        str(many.message),
    )
    assert re.fullmatch(
        r"device 3: leak: 1 buffer \(24 bytes\) allocated at \S*test_device\.py:\d+ was never freed", str(one.message)
    )
    assert many.filename.endswith("test_device.py")
    assert many.lineno + 1 == one.lineno


def test_arrays_scratch_and_failed_programs_are_not_reported_as_leaks():
    def fail():
        with contextlib.suppress(KeyError), Device() as npu:
            npu.malloc(1000)
            raise KeyError

    def clean():
        with Device() as npu:
            npu.keep = npu.zeros(10)
            npu.arena.malloc(100, "scratch")

    assert leaks_of(fail) == []
    assert leaks_of(clean) == []


def test_close_finishes_queued_work_runs_hooks_latest_first_and_may_be_repeated():
    order = []
    npu = Device(check="strict")
    npu.add_close_hook(lambda: order.append("first"))
    npu.add_close_hook(lambda: order.append("second"))
    x = npu.zeros(1)
    kernel = Kernel("note", lambda out: order.append("task"), lambda out: Cost(0, 0))
    npu.launch(kernel, x)
    npu.close()
    npu.close()
    assert order == ["second", "first", "task"]


def test_the_first_error_of_a_close_hook_is_raised_after_everything_is_closed():
    npu = Device()
    npu.add_close_hook(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        npu.close()
    assert npu.closed
    assert npu.arena.closed


def test_a_closed_device_refuses_everything_in_a_sentence():
    npu = Device()
    x = npu.zeros(2)
    npu.close()
    for use in (
        lambda: npu.malloc(8),
        lambda: npu.zeros(2),
        lambda: npu.array([1.0]),
        npu.stream,
        npu.event,
        lambda: npu.launch(fill, 0, out=x),
        lambda: npu.add_close_hook(print),
        npu.__enter__,
    ):
        with pytest.raises(ClosedError, match="device 0: closed: "):
            use()
    assert "closed" in repr(npu)


def test_a_task_keeps_its_operands_until_it_has_ended():
    """A kernel in steps is still running when the last name of its operand goes: the memory must not be used again."""

    def in_steps(x, out):
        for row in range(len(x)):
            out[row] = x[row]
            yield

    kernel = Kernel("copy rows", in_steps, lambda x, out: Cost(0, 2 * x.nbytes))
    with Device(check="strict") as npu:
        x, out = npu.array(np.arange(12.0).reshape(4, 3)), npu.empty((4, 3), "float64")
        npu.launch(kernel, x, out=out)
        del x
        assert out.numpy().tolist() == np.arange(12.0).reshape(4, 3).tolist()


def test_an_event_recorded_again_does_not_release_who_waits_for_its_first_record():
    with Device(order="lazy") as npu:
        busy, idle, waiting = npu.stream(), npu.stream(), npu.stream()
        seen = []
        event = npu.event()

        def slowly(stream):
            for _ in range(3):
                yield None
            seen.append("first record")

        busy.enqueue(slowly)
        busy.record(event)
        waiting.wait(event)
        waiting.enqueue(lambda stream: seen.append("waiter"))
        idle.record(event)
        idle.synchronize()
        waiting.synchronize()
        assert seen == ["first record", "waiter"]
