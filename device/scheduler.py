"""Who runs the tasks? One cooperative scheduler per device resumes the head of each stream in turn.

It mirrors the chip, where one task scheduler feeds all streams, so two ranks that synchronize two streams in opposite
order do not deadlock. Whoever synchronizes drives the scheduler itself; one daemon thread drives it while nobody does.
Refused alternatives: a thread per stream (34 µs per hand-over, order not repeatable); a plain deferred queue
(deadlocks).

The daemon polls each millisecond while there is work and sleeps on an Event otherwise, so a loop of enqueue and
synchronize pays for a notification only once. `lazy` order starts nothing before somebody waits.
"""

from __future__ import annotations

import contextvars
import threading
import time
from threading import get_ident
from typing import NoReturn

import numpy as np

from device.errors import ClosedError, TimeoutError
from device.stream import Stream
from device.wait import Patience, Wait, wait_any

_POLL_S = 0.001
_LONGEST_POLL_S = 0.004
_POLLS_BEFORE_SLEEP = 20


class Scheduler:
    """Runs the tasks of one device's streams. `asleep` tells an enqueuer that `notify` is needed."""

    def __init__(self, name: str, *, threaded: bool, lazy: bool) -> None:
        self.name = name
        self.lazy = lazy
        self.threaded = threaded and not lazy
        self.asleep = not lazy
        self.closed = False
        self.patience = Patience.for_ranks(1)
        self._streams: list[Stream] = []
        self._lock = threading.Lock()  # held by the one thread that drives
        self._driver = 0  # its thread ident
        self._wanted = 0  # threads that wait to drive; the daemon makes room for them
        self._bell = threading.Event()
        self._thread: threading.Thread | None = None
        # An NPU says nothing when numbers overflow. NumPy's error state belongs to the context, and entering a context
        # of our own costs a tenth of `np.errstate` around each task; only one thread is in it, since only one drives.
        self._context = contextvars.copy_context()
        self._context.run(np.seterr, all="ignore")

    # ------------------------------------------------------------------------------------------------------ for streams
    def add(self, stream: Stream) -> None:
        """Serve one more stream."""
        self._streams = [*self._streams, stream]

    def remove(self, stream: Stream) -> None:
        """Stop serving an idle stream."""
        self._streams = [s for s in self._streams if s is not stream]

    def notify(self, stream: Stream) -> None:
        """React to an enqueue while `asleep`: wake the daemon, or run at once when there is none."""
        if not self.threaded:
            self.make_progress()
            return
        self.asleep = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"{self.name} scheduler", daemon=True)
            self._thread.start()
        self._bell.set()

    def raise_closed(self, stream: Stream) -> NoReturn:
        """Refuse work for a closed device."""
        raise ClosedError(f"{self.name}: enqueue on {stream.name} after the device was closed")

    # ----------------------------------------------------------------------------------------------------- driving
    def run_until(self, stream: Stream, ticket: int, timeout_s: float | None) -> None:
        """Drive until `stream` has finished `ticket` tasks. Raises `TimeoutError` after `timeout_s` seconds."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._lock.acquire(False) and not self._acquire(stream, ticket, deadline):
            return
        self._driver = get_ident()
        try:
            self._context.run(self._drive, stream, ticket, timeout_s, deadline)
        finally:
            self._driver = 0
            self._lock.release()

    def make_progress(self) -> None:
        """Run whatever can run now, without waiting, unless somebody drives already."""
        if self._lock.acquire(False):
            self._driver = get_ident()
            try:
                while self._context.run(self._pass):
                    pass
            finally:
                self._driver = 0
                self._lock.release()

    def look(self) -> None:
        """Make progress for somebody who polls, when no thread does; hopeless waits raise inside their tasks."""
        if self.threaded or not self._lock.acquire(False):
            return
        self._driver = get_ident()
        try:
            while self._context.run(self._pass):
                pass
            for stream in self._streams:
                wait = stream._blocked
                if wait is not None and not wait.ready():
                    self._context.run(self._check, stream, wait)
        finally:
            self._driver = 0
            self._lock.release()

    def _drive(self, stream: Stream, ticket: int, timeout_s: float | None, deadline: float | None) -> None:
        streams = self._streams
        single = len(streams) == 1
        while stream._done < ticket:
            moved = self._advance(stream)
            if not single and not (moved and self.lazy):
                for other in streams:
                    if other is not stream and other._done != other._submitted and self._advance(other):
                        moved = True
            if not moved:
                self._block()
                if deadline is not None and time.monotonic() > deadline and stream._done < ticket:
                    self._raise_timeout(stream, timeout_s)

    def _acquire(self, stream: Stream, ticket: int, deadline: float | None) -> bool:
        """Get the right to drive; False when somebody else has driven `stream` far enough meanwhile."""
        if self._driver == get_ident():
            raise RuntimeError(f"{self.name}: a task tried to synchronize {stream.name}; a task must yield instead")
        self._wanted += 1
        try:
            while not self._lock.acquire(timeout=0.002):
                if stream._done >= ticket:
                    return False
                if deadline is not None and time.monotonic() > deadline:
                    self._raise_timeout(stream, None)
        finally:
            self._wanted -= 1
        return True

    def _pass(self) -> bool:
        """Give each stream one turn; tell whether any moved."""
        moved = False
        for stream in self._streams:
            if stream._done != stream._submitted and self._advance(stream):
                moved = True
        return moved

    def _advance(self, stream: Stream) -> bool:
        """Give `stream` one turn: start or resume its head. False when it is blocked or empty."""
        blocked = stream._blocked
        if blocked is not None:
            if not blocked.ready():
                return False
            stream._blocked = None
        generator = stream._current
        try:
            if generator is None:
                if not stream._queue:
                    return False
                _, function, args, turn = stream._queue.popleft()
                generator = function(stream, *args) if turn is None else function(stream, turn, *args)
                if generator is None:
                    stream._done += 1
                    return True
                stream._current = generator
                stream._operands = args  # memory goes with the last array over it: not before the task has ended
            stream._blocked = next(generator)
        except StopIteration:
            stream._current = stream._operands = None
            stream._done += 1
        except BaseException as error:
            self._fail(stream, error)
        return True

    def _fail(self, stream: Stream, error: BaseException) -> None:
        """Make `error` sticky, drop the queue, tell the owners of what was dropped."""
        stream.error = error
        stream._current = stream._blocked = stream._operands = None
        with stream._mutex:
            dropped = list(stream._queue)
            stream._queue.clear()
            stream._done = stream._submitted
        for owner in {id(o): o for o, *_ in dropped if o is not None}.values():
            owner.task_dropped(error)
        if not isinstance(error, Exception):
            raise error  # Ctrl-C and interpreter exit belong to the thread that drives

    def _block(self) -> None:
        """Wait until some blocked stream may go on, then let hopeless waits raise inside their tasks."""
        blocked = [s for s in self._streams if s._blocked is not None]
        waits: list[Wait] = [s._blocked for s in blocked if s._blocked is not None]
        if waits:
            wait_any(waits, self.patience, self._make_room)
            for stream, wait in zip(blocked, waits, strict=True):
                if not wait.ready():
                    self._check(stream, wait)

    def _check(self, stream: Stream, wait: Wait) -> None:
        try:
            wait.check()
        except BaseException as error:
            stream._blocked = None
            try:
                if stream._current is not None:  # the task may tidy up and say more about what it was doing
                    stream._blocked = stream._current.throw(error)
            except StopIteration:
                stream._current = stream._operands = None
                stream._done += 1
            except BaseException as final:
                self._fail(stream, final)

    def _make_room(self) -> bool:
        """Tell whether the driver should stop waiting because a synchronizing thread wants to drive."""
        return self._wanted > 0 and self._thread is not None and self._driver == self._thread.ident

    def _raise_timeout(self, stream: Stream, timeout_s: float | None) -> NoReturn:
        blocked = stream._blocked
        what = f"it waits for {blocked.describe()}" if blocked is not None else "its tasks are still running"
        limit = "its limit" if timeout_s is None else f"{timeout_s:g} s"
        raise TimeoutError(f"{self.name}: {stream.name} was not done after {limit}: {what}")

    # ------------------------------------------------------------------------------------------------------ daemon
    def _serve(self) -> None:
        """Look for work that nobody drives. When others are seen to drive it, look less often."""
        nap_s, seen, idle = _POLL_S, -1, 0
        while not self.closed:
            time.sleep(nap_s)
            done = sum(s._done for s in self._streams)
            if any(s._done != s._submitted for s in self._streams):
                idle = 0
                if done != seen and nap_s < _LONGEST_POLL_S:
                    nap_s *= 2  # it moves without us
                elif self._wanted == 0 and self._lock.acquire(False):
                    nap_s = _POLL_S
                    self._driver = get_ident()
                    try:
                        self._context.run(self._drive_for_others)
                    finally:
                        self._driver = 0
                        self._lock.release()
            elif done != seen:
                idle = 0
                nap_s = min(2 * nap_s, _LONGEST_POLL_S)
            elif idle < _POLLS_BEFORE_SLEEP:
                idle += 1
            else:
                self._rest()
                nap_s, idle = _POLL_S, 0
            seen = done

    def _rest(self) -> None:
        """Sleep until somebody enqueues."""
        self._bell.clear()
        self.asleep = True
        if not any(s._done != s._submitted for s in self._streams):
            self._bell.wait()
        self.asleep = False

    def _drive_for_others(self) -> None:
        while not self.closed and self._wanted == 0 and any(s._done != s._submitted for s in self._streams):
            if not self._pass():
                self._block()

    def close(self) -> None:
        """Stop the daemon. Work that is left stays undone; `Device.close` synchronizes before."""
        self.closed = True
        self.asleep = False
        self._bell.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
