"""How does a blocked task wait? The one wait loop of the project, and the futex under it.

A blocked task yields a `Wait`. The scheduler polls `ready()`: first in a tight loop, then giving the core away with
`os.sched_yield`, then asleep in `Wait.sleep` (a shared futex for peers in other processes) for at most `NAP_S`; after
each nap `check()` may raise when waiting on has no sense (peer dead, limit passed, somebody aborted). Nothing waits
without passing through here, so nothing hangs without a limit.

Measured on the machines that this is made for: `time.sleep(0)` costs 44 µs, `sched_yield` 0.3 µs; yield alone stalls
for milliseconds when the ranks are in different sessions or cgroups, hence the futex; pure spinning costs 10-24 ms a
step when ranks outnumber cores, hence `Patience`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NAP_S = 0.002  # longest sleep before liveness, abort and limits are looked at again


class Wait:
    """What a blocked task waits for. Subclasses say when it is over and how to sleep until then."""

    __slots__ = ()

    def ready(self) -> bool:
        """Tell whether the task can go on; called often, must be cheap and must not block."""
        raise NotImplementedError

    def describe(self) -> str:
        """Say in one clause what is waited for; goes into error messages."""
        raise NotImplementedError

    def sleep(self, timeout_s: float) -> None:
        """Give the core away until the condition may have changed, at most `timeout_s` seconds."""
        time.sleep(timeout_s)

    def check(self) -> None:
        """Raise when the condition can never become true (peer dead, limit passed)."""


@dataclass(frozen=True)
class Patience:
    """How long to poll before sleeping: `spins` tight polls, then `yields` times `sched_yield`, or `yield_s` seconds.

    With a core for every rank a reply is near, so poll; with fewer cores the peer cannot answer before we let go.
    """

    spins: int
    yields: int
    yield_s: float

    @classmethod
    def for_ranks(cls, ranks: int) -> Patience:
        """Choose for `ranks` processes or threads that share this host's cores."""
        cores = os.cpu_count() or 1  # not the affinity: an MPI launcher may have bound each rank to a core of its own
        return cls(100, 1000, 100e-6) if ranks <= cores else cls(0, 10, 0.0)


def poll(word: memoryview, target: int, patience: Patience) -> bool:
    """Look at a shared word for as long as `patience` says before sleeping; tell whether it has reached `target`.

    For tasks that expect the word at any moment: cheaper than yielding a `Wait`, and as bounded as one turn.
    """
    for _ in range(patience.spins):
        if word[0] >= target:
            return True
    rounds = patience.yields
    if not patience.yield_s:
        while rounds and word[0] < target:
            os.sched_yield()
            rounds -= 1
        return rounds > 0 or word[0] >= target
    end = time.perf_counter() + patience.yield_s
    while word[0] < target:
        os.sched_yield()
        if time.perf_counter() > end:
            return word[0] >= target
    return True


def wait_any(waits: Sequence[Wait], patience: Patience, give_up: Callable[[], bool]) -> None:
    """Return when one of `waits` is over, when `give_up()` says so, or after about one nap. The caller loops."""
    end = time.perf_counter() + NAP_S
    nap_s = NAP_S if len(waits) == 1 else NAP_S / 4
    while True:
        for _ in range(patience.spins):
            for wait in waits:
                if wait.ready():
                    return
        began = time.perf_counter()
        for _ in range(patience.yields):
            for wait in waits:
                if wait.ready():
                    return
            if patience.yield_s and time.perf_counter() - began > patience.yield_s:
                break
            os.sched_yield()
        if give_up():
            return
        waits[0].sleep(nap_s)
        if time.perf_counter() > end:
            return


# --------------------------------------------------------------------------------------------------------------- futex
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # without the PRIVATE flag: the word lies in memory shared between processes
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())


class _Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


def _futex_syscall() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux") or _SYS_FUTEX is None:
        return None
    call: Callable[..., int] = ctypes.CDLL(None, use_errno=True).syscall
    return call


_syscall = _futex_syscall()


class Futex:
    """A 32-bit word in shared memory that processes can sleep on. Elsewhere than on Linux it naps instead."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)

    def wait(self, expected: int, timeout_s: float) -> None:
        """Sleep while the word is `expected` (low 32 bits), at most `timeout_s` seconds. Spurious returns happen."""
        if _syscall is None:
            time.sleep(min(timeout_s, 50e-6))
            return
        spec = _Timespec(0, int(timeout_s * 1e9))
        value = ctypes.c_int(
            expected & 0xFFFFFFFF if expected & 0x80000000 == 0 else (expected & 0xFFFFFFFF) - (1 << 32)
        )
        _syscall(_SYS_FUTEX, self._address, _FUTEX_WAIT, value, ctypes.byref(spec), None, 0)

    def wake(self) -> None:
        """Wake everybody who sleeps on the word."""
        if _syscall is not None:
            _syscall(_SYS_FUTEX, self._address, _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)


# --------------------------------------------------------------------------------------------------------------- fence
_fence_lock = threading.Lock()


def _fence() -> None:
    with _fence_lock:
        pass


# x86 keeps stores in order and loads in order, which is all that flag-after-data needs. Elsewhere an uncontended lock
# is the cheapest full barrier that pure Python has.
fence: Callable[[], None] | None = None if platform.machine() in ("x86_64", "AMD64", "i686") else _fence
