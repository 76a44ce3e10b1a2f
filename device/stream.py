"""What runs in what order on one NPU: streams of tasks, and events between them.

A task is a function `fn(stream, *args)`. It returns None when done, or a generator that yields a `Wait` when it is
blocked and None when it only lets others go first. Tasks of one stream run in order; nothing is said about the order
across streams except through events. Virtual time: `stream.now_s` is a max-plus clock that only the stream's own tasks
advance; an event carries it to other streams.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from device.wait import Wait

if TYPE_CHECKING:
    from device.device import Device
    from device.scheduler import Scheduler

TaskGenerator = Generator[Wait | None, None, None]
TaskFunction = Callable[..., TaskGenerator | None]


class TaskOwner(Protocol):
    """Who enqueued a task and must hear that it will never run."""

    def task_dropped(self, error: BaseException) -> None:
        """Take note that the stream failed with `error` before the task ran."""


class Stream:
    """An ordered queue of tasks on one device. Made by `Device.stream()`; the device owns it.

    Attributes:
        now_s: virtual seconds at which the last finished task ended.
        compute_s, comm_s, wait_s, copy_s: virtual seconds spent so far, by kind.
        error: the first error of a task. It is sticky: the queue is dropped and every later touch raises it.
    """

    __slots__ = (
        "__weakref__",
        "_blocked",
        "_current",
        "_done",
        "_mutex",
        "_operands",
        "_queue",
        "_scheduler",
        "_submitted",
        "comm_s",
        "compute_s",
        "copy_s",
        "device",
        "error",
        "index",
        "name",
        "now_s",
        "wait_s",
    )

    def __init__(self, device: Device, scheduler: Scheduler, index: int, name: str = "") -> None:
        self.device = device
        self.index = index
        self.name = name or ("default" if index == 0 else f"stream {index}")
        self.now_s = 0.0
        self.compute_s = self.comm_s = self.wait_s = self.copy_s = 0.0
        self.error: BaseException | None = None
        self._scheduler = scheduler
        self._queue: deque[tuple[TaskOwner | None, TaskFunction, tuple[Any, ...], int | None]] = deque()
        self._mutex = threading.RLock()  # a signal handler may enqueue in the middle of an enqueue
        self._submitted = 0
        self._done = 0
        self._operands: tuple[Any, ...] | None = None  # of the task that runs
        self._current: TaskGenerator | None = None
        self._blocked: Wait | None = None

    def __repr__(self) -> str:
        state = f"failed: {self.error!r}" if self.error else f"{self.pending} pending"
        return f"<Stream {self.name!r} of device {self.device.id}, {state}, now {self.now_s:.9f} s>"

    @property
    def pending(self) -> int:
        """Number of tasks that are not finished."""
        return self._submitted - self._done

    def enqueue(self, fn: TaskFunction, *args: Any) -> None:
        """Append the task `fn(stream, *args)` and return at once.

        Raises: the stream's sticky error; `ClosedError` when the device is closed.
        """
        self.enqueue_call(fn, args, None, None)

    def enqueue_call(
        self, fn: TaskFunction, args: tuple[Any, ...], owner: TaskOwner | None, turns: Iterator[int] | None
    ) -> None:
        """Append a task for a library that must know of it.

        owner: hears about it when the stream fails before the task ran. turns: a counter whose next number the task
        gets after the stream; numbers of one counter rise along each stream even when several threads enqueue.
        Raises: as `enqueue`.
        """
        if self.error is not None:
            raise self.error
        scheduler = self._scheduler
        if scheduler.closed:
            scheduler.raise_closed(self)
        with self._mutex:
            self._queue.append((owner, fn, args, None if turns is None else next(turns)))
            self._submitted += 1
        if scheduler.asleep:
            scheduler.notify(self)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until everything enqueued so far is done; the calling thread runs the tasks itself if it can.

        Raises: the first error of a task (again at every later call); `device.TimeoutError` after `timeout_s` seconds
        of wall time, naming what the stream waits for.
        """
        if self._done != self._submitted:
            self._scheduler.run_until(self, self._submitted, timeout_s)
        if self.error is not None:
            raise self.error

    def query(self) -> bool:
        """Tell whether everything enqueued so far is done, without waiting."""
        if self._done != self._submitted:
            self._scheduler.look()
        if self.error is not None:
            raise self.error
        return self._done == self._submitted

    def record(self, event: Event | None = None) -> Event:
        """Put a mark behind everything enqueued so far and return it as an event."""
        if event is None:
            event = Event(self.device)
        self.enqueue(_complete, event._arm(self))
        return event

    def wait(self, event: Event) -> None:
        """Let later tasks of this stream start only when `event` has happened (never blocks the caller)."""
        if event._mark is not None:  # an event that nobody recorded yet holds nobody back, as in CUDA and ACL
            self.enqueue(_hold, event._mark)


class _Mark:
    """One record of an event: it may be recorded again, elsewhere, before this one is reached."""

    __slots__ = ("done", "stream", "ticket", "time_s")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.ticket = stream._submitted + 1
        self.done = False
        self.time_s = 0.0


class Event:
    """A point in a stream. `time_s` is its virtual time once `done`."""

    __slots__ = ("_mark", "device")

    def __init__(self, device: Device) -> None:
        self.device = device
        self._mark: _Mark | None = None  # the latest record

    @property
    def done(self) -> bool:
        """Whether the latest record has been reached."""
        mark = self._mark
        if mark is not None and not mark.done:
            mark.stream._scheduler.look()
        return mark is None or mark.done

    @property
    def time_s(self) -> float:
        """Virtual time of the latest record, 0 until it is reached."""
        return 0.0 if self._mark is None else self._mark.time_s

    def _arm(self, stream: Stream) -> _Mark:
        self._mark = mark = _Mark(stream)
        return mark

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until the event has happened. Raises the recording stream's error, or `device.TimeoutError`."""
        mark = self._mark
        if mark is None:
            return
        stream = mark.stream
        if stream._done < mark.ticket:
            stream._scheduler.run_until(stream, mark.ticket, timeout_s)
        if not mark.done and stream.error is None:  # another thread enqueued while the event was recorded
            stream._scheduler.run_until(stream, stream._submitted, timeout_s)
        if stream.error is not None and not mark.done:
            raise stream.error

    def elapsed_s(self, since: Event) -> float:
        """Virtual seconds from `since` to this event; both must be done."""
        return self.time_s - since.time_s


class _EventWait(Wait):
    __slots__ = ("mark",)

    def __init__(self, mark: _Mark) -> None:
        self.mark = mark

    def ready(self) -> bool:
        return self.mark.done

    def describe(self) -> str:
        return f"an event of {self.mark.stream.name}"

    def check(self) -> None:
        error = self.mark.stream.error
        if error is not None and not self.mark.done:
            raise error


def _complete(stream: Stream, mark: _Mark) -> None:
    mark.time_s = stream.now_s
    mark.done = True


def _hold(stream: Stream, mark: _Mark) -> TaskGenerator:
    if not mark.done:
        yield _EventWait(mark)
    if mark.time_s > stream.now_s:
        stream.device.timeline.add(stream, "wait for event", "wait", stream.now_s, mark.time_s)
        stream.wait_s += mark.time_s - stream.now_s
        stream.now_s = mark.time_s
