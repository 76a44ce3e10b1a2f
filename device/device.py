"""One emulated NPU: its memory, its streams, its clock, and what happens when it is closed."""

from __future__ import annotations

import math
import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from device.arena import Arena, Check, base_address
from device.array import Buffer, DeviceArray, Shape, as_host, new_array
from device.dtypes import dtype as dtype_entry
from device.errors import ArgumentError, ClosedError, IllegalAddressError
from device.kernels import elementwise
from device.kernels.kernel import Kernel
from device.scheduler import Scheduler
from device.segment import Segment
from device.spec import ChipSpec
from device.spec import spec as chip_spec
from device.stream import Event, Stream
from device.timeline import Timeline

if TYPE_CHECKING:
    from types import TracebackType

    from device.stream import TaskGenerator

_CLOSE_LIMIT_S = 60.0  # wall time that close() gives queued tasks before it says what they wait for


class MemoryInfo(NamedTuple):
    """Bytes of device memory, as ``aclrtGetMemInfo`` gives them."""

    free: int
    total: int


class Device:
    """Own one emulated NPU.

    Devices know nothing of each other; `hccl` connects them. All methods may be called from any thread.

    Args:
        id: how programs and messages call the device.
        spec: the chip, by name or as a `ChipSpec`.
        ordinal: number of the device among all that communicate; its address range follows from it. `id` if left out.
        check: ``"default"`` detects wrong addresses and uses after free; ``"strict"`` also fills fresh and freed memory
            with NaNs and starts nothing before somebody waits, so that a missing synchronize fails every time;
            ``"off"`` skips what costs time. The environment variable ``HCCL_CHECK`` decides if left out.
        progress: ``"thread"`` lets a daemon thread run tasks while nobody waits, ``"inline"`` uses no thread.
        order: ``"eager"`` runs tasks as soon as possible, ``"lazy"`` when somebody waits. Lazy in strict mode, else
            eager, if left out.
        timeline: where to note what happened; a disabled one if left out.

    Attributes:
        arena: the memory. default_stream: the stream used where none is named. closed: whether `close` was called.

    Example:
        >>> from device import Device
        >>> from device.kernels import add
        >>> with Device() as npu:
        ...     x = npu.array([1.0, 2.0])
        ...     npu.launch(add, x, x, out=x)
        ...     x.numpy().tolist()
        [2.0, 4.0]
    """

    def __init__(
        self,
        id: int = 0,
        spec: str | ChipSpec = "ascend910b",
        *,
        ordinal: int | None = None,
        check: Check | None = None,
        progress: Literal["thread", "inline"] = "thread",
        order: Literal["eager", "lazy"] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        if id < 0:
            raise ArgumentError(f"a device id is not negative, got {id}", code=107001)
        if check is None:
            check = cast(Check, os.environ.get("HCCL_CHECK") or "default")
        _one_of("check", check, ("default", "strict", "off"))
        _one_of("progress", progress, ("thread", "inline"))
        if order is None:
            order = "lazy" if check == "strict" else "eager"
        _one_of("order", order, ("eager", "lazy"))
        self.id = id
        self.name = f"device {id}"
        self.ordinal = id if ordinal is None else ordinal
        self.spec = chip_spec(spec)
        self.check: Check = check
        self.order = order
        self.timeline = Timeline(enabled=False) if timeline is None else timeline
        self.closed = False
        base = base_address(self.ordinal)
        segment = Segment.create(self.spec.hbm_bytes, f"hccl-device-{self.ordinal}")
        self.arena = Arena(segment, base, self.spec.hbm_bytes, name=self.name, check=check)
        self._lock = threading.Lock()
        self._hooks: list[Callable[[], object]] = []
        self._closing = False
        self._scheduler = Scheduler(self.name, threaded=progress == "thread", lazy=order == "lazy")
        self._streams: list[Stream] = []
        self._stream_count = 0
        self.default_stream = self.stream()

    # ----------------------------------------------------------------------------------------------------------- memory
    def malloc(self, nbytes: int) -> Buffer:
        """Allocate bytes that the program frees itself; their content is undefined.

        Raises:
            ArgumentError: `nbytes` is not positive.
            OutOfMemoryError: the device has not that much left.
        """
        if nbytes <= 0:
            raise ArgumentError(f"{self.name}: malloc of {nbytes} bytes", code=100000)
        return Buffer(self, self.arena.malloc(nbytes))

    def empty(self, shape: int | Iterable[int], dtype: Any = "float32") -> DeviceArray:
        """Return a new array of undefined content. Its memory goes with the last array over it."""
        entry = dtype_entry(dtype)
        sizes = _shape(shape)
        return new_array(self, self.arena.malloc(math.prod(sizes) * entry.size, "array"), sizes, entry)

    def zeros(self, shape: int | Iterable[int], dtype: Any = "float32") -> DeviceArray:
        """Return a new array of zeros. Memory that was never used is zero already and is not touched."""
        array = self.empty(shape, dtype)
        if not array._alloc.fresh:
            array._np.fill(0)
        return array

    def array(self, host: Any, dtype: Any = None, stream: Stream | None = None) -> DeviceArray:
        """Return a copy of host data in device memory.

        The copy is done when this returns; no stream is waited for.

        Args:
            host: an ndarray, anything with the buffer protocol, or nested lists of numbers.
            dtype: element type on the device; the data's own if left out.
            stream: whose virtual clock pays for the copy; the default stream's if left out.

        Raises:
            ArgumentError: the element type does not exist on the device.
            OutOfMemoryError: the device has not that much left.
        """
        source = host if type(host) is np.ndarray else as_host(host)
        kind = source.dtype if dtype is None else dtype
        if dtype is None and not source.dtype.isnative:
            kind = source.dtype.newbyteorder("=")
        array = self.empty(source.shape, kind)
        np.copyto(array._np, source, casting="unsafe")
        self.charge_copy(array.nbytes, True, stream)
        return array

    def copy(self, source: DeviceArray, target: DeviceArray, stream: Stream | None = None) -> None:
        """Queue a copy from one array of this device to another, behind the tasks that use them; returns at once.

        Raises:
            ArgumentError: shape or type differ.
            IllegalAddressError: one of the two is freed or lies on another device.
        """
        self._check_operands("copy", (source, target))
        if source.shape != target.shape or source.dtype != target.dtype:
            raise ArgumentError(
                f"{self.name}: copy: expected shape {target.shape} {target.dtype}, got {source.shape} {source.dtype}"
            )
        users = source._alloc.writers + target._alloc.readers + target._alloc.writers
        if stream is None:
            stream = users[-1] if users else self.default_stream
        for other in {id(s): s for s in users if s is not stream}.values():
            stream.wait(other.record())
        self.launch(elementwise.copy, source, out=target, stream=stream)

    def resolve(self, address: int, nbytes: int, what: str = "access") -> npt.NDArray[np.uint8]:
        """Return the bytes at an integer device address; see `Arena.resolve`."""
        return self.arena.resolve(address, nbytes, what)

    def memory_info(self) -> MemoryInfo:
        """Return free and total bytes of device memory."""
        return MemoryInfo(self.arena.capacity - self.arena.used, self.arena.capacity)

    # ------------------------------------------------------------------------------------------------- streams and work
    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams of this device, the default stream first."""
        return tuple(self._streams)

    def stream(self, name: str = "") -> Stream:
        """Return a new stream; it lives until `release_stream` or the end of the device."""
        self._open("stream")
        with self._lock:
            stream = Stream(self, self._scheduler, self._stream_count, name)
            self._stream_count += 1
            self._streams.append(stream)
            self._scheduler.add(stream)
        return stream

    def release_stream(self, stream: Stream) -> None:
        """Wait for a stream and forget it.

        Raises:
            ArgumentError: it is the default stream, or not a stream of this device.
        """
        if stream is self.default_stream or stream not in self._streams:
            which = "the default stream" if stream is self.default_stream else "not a stream of this device"
            raise ArgumentError(f"{self.name}: {stream.name} is {which} and cannot be released", code=107003)
        try:
            stream.synchronize()
        finally:
            with self._lock:
                self._streams.remove(stream)
                self._scheduler.remove(stream)

    def event(self) -> Event:
        """Return an event that nobody recorded yet; `Stream.record` takes it."""
        self._open("event")
        return Event(self)

    def launch(self, kernel: Kernel, *args: Any, stream: Stream | None = None, **kwargs: Any) -> None:
        """Queue a kernel and return at once.

        Args:
            kernel: what to do; it sees a NumPy view in place of each array.
            args: its operands: device arrays and numbers; host arrays are refused, as a chip refuses their address.
            stream: where to queue it; the default stream if left out.
            kwargs: more operands (`out=`) and attributes; an attribute may be a host array.

        Raises:
            IllegalAddressError: an operand is freed, or not memory of this device.
            ArgumentError: the stream belongs to another device.
            DeviceError: the stream failed before (its own error is raised).
        """
        stream = self.default_stream if stream is None else stream
        if stream.device is not self:
            raise ArgumentError(
                f"{self.name}: launch of {kernel.name} on {stream.name} of {stream.device.name}", code=107003
            )
        operands = args if "out" not in kwargs else (*args, kwargs["out"])
        self._check_operands(kernel.name, operands)
        for operand in (*args, *kwargs.values()):
            if isinstance(operand, DeviceArray):
                # Kernels do not say which operands they write. Waiting for a reader too is never wrong.
                operand._alloc.written_by(stream)
        stream.enqueue(_run_kernel, kernel, args, kwargs)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait for all streams.

        Raises:
            DeviceError: the first error of a task (its own error is raised).
            TimeoutError: not done after `timeout_s` seconds of wall time.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for stream in self.streams:
            stream.synchronize(None if end is None else max(0.0, end - time.monotonic()))

    def charge_copy(self, nbytes: int, to_device: bool, stream: Stream | None = None) -> None:
        """Let a stream's virtual clock pay for a copy between host and device, behind what is queued there."""
        stream = self.default_stream if stream is None else stream
        what = "copy to device" if to_device else "copy to host"
        seconds = self.spec.host_copy_s(nbytes, to_device)
        # An idle stream is charged here: no task runs, and none can be added while we hold the mutex.
        with stream._mutex:
            if stream._done == stream._submitted and stream.error is None:
                _charge(stream, what, seconds, nbytes)
                return
        stream.enqueue(_charge, what, seconds, nbytes)

    # ------------------------------------------------------------------------------------------------------------ close
    def add_close_hook(self, hook: Callable[[], object]) -> None:
        """Have `hook()` called when the device closes, before its streams are waited for; the latest first."""
        self._open("add_close_hook")
        self._hooks.append(hook)

    def close(self, timeout_s: float = _CLOSE_LIMIT_S) -> None:
        """Finish queued work, report leaks and give the memory back. May be called again.

        Everything is released even when something fails; the first error is raised afterwards.

        Raises:
            DeviceError: a task failed (its own error is raised), also if it was raised before: errors are sticky.
            TimeoutError: queued work was not done within `timeout_s` seconds of wall time.
        """
        self._close(timeout_s, failed=False)

    def abort(self) -> None:
        """Give everything back at once: no waiting for queued work, no leak report, no errors. May be called again."""
        self._close(0.0, failed=True)

    def __enter__(self) -> Device:
        self._open("with")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error, neither waiting nor a leak report tells anything new.
        self._close(_CLOSE_LIMIT_S, failed=error is not None)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.arena.used} of {self.arena.capacity} bytes used"
        return f"<Device {self.id}, {self.spec.soc_name}, {state}>"

    # ---------------------------------------------------------------------------------------------------------- private
    def _close(self, timeout_s: float, failed: bool) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            hooks, self._hooks = self._hooks, []
        errors: list[BaseException] = []
        for step in (*reversed(hooks), *(() if failed else (lambda: self.synchronize(timeout_s),))):
            try:
                step()
            except Exception as error:
                errors.append(error)
        self.closed = True
        self._scheduler.close()
        try:
            if not failed and not errors:
                self.arena.report_leaks()
        finally:
            self.arena.close()
        if errors and not failed:
            raise errors[0]

    def _open(self, what: str) -> None:
        if self.closed:
            raise ClosedError(f"{self.name}: closed: {what}")

    def _check_operands(self, name: str, operands: Iterable[Any]) -> None:
        for operand in operands:
            if isinstance(operand, DeviceArray):
                if operand.device is not self:
                    raise IllegalAddressError(
                        f"{self.name}: wrong device: {name}: address {operand.address:#x} belongs to "
                        f"{operand.device.name}"
                    )
                if not operand._alloc.live:
                    raise operand._alloc.dead()
            elif isinstance(operand, np.ndarray):
                raise IllegalAddressError(
                    f"{self.name}: illegal memory access: {name}: an operand of shape {operand.shape} {operand.dtype} "
                    f"lies in host memory; copy it with Device.array first"
                )
            elif isinstance(operand, Buffer):
                raise ArgumentError(f"{self.name}: {name}: a Buffer has no type; pass buffer.view(dtype, shape)")


def _run_kernel(stream: Stream, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TaskGenerator | None:
    """The task of a launch."""
    views = [_view(x) for x in args]
    named = {key: _view(x) for key, x in kwargs.items()}
    wall_start_s = time.perf_counter()
    work = kernel.run(*views, **named)
    if work is None or not hasattr(work, "__next__"):
        _account(stream, kernel, views, named, wall_start_s)
        return None
    return _continue(stream, kernel, views, named, cast("Iterator[None]", work), wall_start_s)


def _continue(
    stream: Stream,
    kernel: Kernel,
    views: list[Any],
    named: dict[str, Any],
    work: Iterator[None],
    wall_start_s: float,
) -> TaskGenerator:
    for _ in work:
        yield None
    _account(stream, kernel, views, named, wall_start_s)


def _account(stream: Stream, kernel: Kernel, views: list[Any], named: dict[str, Any], wall_start_s: float) -> None:
    cost = kernel.cost(*views, **named)
    seconds = stream.device.spec.time_s(cost)
    start_s = stream.now_s
    stream.now_s = start_s + seconds
    stream.compute_s += seconds
    timeline = stream.device.timeline
    if timeline.enabled:
        args = {"flops": cost.flops, "bytes": cost.bytes, "unit": cost.unit}
        timeline.add(stream, kernel.name, "compute", start_s, stream.now_s, wall_start_s, time.perf_counter(), args)


def _charge(stream: Stream, what: str, seconds: float, nbytes: int) -> None:
    start_s = stream.now_s
    stream.now_s = start_s + seconds
    stream.copy_s += seconds
    timeline = stream.device.timeline
    if timeline.enabled:
        timeline.add(stream, what, "copy", start_s, stream.now_s, args={"bytes": nbytes})


def _view(operand: Any) -> Any:
    if not isinstance(operand, DeviceArray):
        return operand
    if not operand._alloc.live:
        raise operand._alloc.dead()
    return operand._np


def _shape(shape: int | Iterable[int]) -> Shape:
    if type(shape) is tuple:
        for size in shape:
            if type(size) is not int or size < 0:
                break
        else:
            return shape
    try:
        sizes = tuple(map(operator.index, (shape,) if isinstance(shape, int) else shape))
    except TypeError:
        sizes = (-1,)
    if sizes and min(sizes) < 0:
        raise ArgumentError(f"a shape consists of integers >= 0, got {shape!r}")
    return sizes


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ArgumentError(f"{name} is one of {', '.join(map(repr, allowed))}, got {value!r}")
