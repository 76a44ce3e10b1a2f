import os
import re
import sys
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device.arena import ALIGNMENT, Arena, base_address, ordinal_of
from device.errors import ArgumentError, ClosedError, IllegalAddressError, OutOfMemoryError
from device.memory import Segment
from device.sites import describe

MIB = 1 << 20
BASE = base_address(2)


def make(capacity=64 * MIB, check="default"):
    return Arena(Segment.create(capacity), BASE, capacity, name="device 2", check=check)


@pytest.fixture
def arena():
    made = make()
    yield made
    made.close()


def here(offset=0):
    """FILE:LINE of the caller, as messages spell it."""
    frame = sys._getframe(1)
    return re.escape(describe((frame.f_code, frame.f_lasti)).rsplit(":", 1)[0]) + f":{frame.f_lineno + offset}"


# ------------------------------------------------------------------------------------------------------------ addresses
def test_an_address_tells_its_device():
    assert ordinal_of(base_address(0)) == 0
    assert ordinal_of(base_address(65535) + (1 << 40) - 1) == 65535
    assert ordinal_of(id(object())) is None
    with pytest.raises(ArgumentError, match=r"0\.\.65535, got 65536"):
        base_address(65536)


def test_allocations_are_aligned_distinct_and_start_at_the_base(arena):
    addresses = [arena.malloc(n).address for n in (1, 511, 512, 513, 0, 0)]
    assert addresses[0] == BASE
    assert all(a % ALIGNMENT == 0 for a in addresses)
    assert [b - a for a, b in pairwise(addresses)] == [512, 512, 512, 1024, 512]


def test_resolve_gives_the_bytes_at_an_address_inside_and_at_the_edges(arena):
    a = arena.malloc(1000)
    arena.resolve(a.address, 1000)[:] = np.arange(1000) % 251
    assert arena.resolve(a.address + 600, 2).tolist() == [600 % 251, 601 % 251]
    assert arena.resolve(a.address + 999, 1).tolist() == [999 % 251]
    assert arena.resolve(a.address + 1000, 0).size == 0
    assert arena.find(a.address + 999) is a
    assert arena.find(BASE + 4096) is None


# ------------------------------------------------------------------------------------------------------------- messages
def test_reading_past_the_end_names_the_allocation(arena):
    a = arena.malloc(1024)
    line = here(-1)
    with pytest.raises(
        IllegalAddressError,
        match=rf"^device 2: out of bounds: copy of 1024 bytes at {a.address + 512:#x} ends 512 bytes past the end of a "
        rf"1024-byte allocation made at {line}$",
    ):
        arena.resolve(a.address + 512, 1024, "copy")


def test_use_after_free_names_both_lines(arena):
    a = arena.malloc(1024)
    allocated = here(-1)
    arena.free(a)
    freed = here(-1)
    with pytest.raises(
        IllegalAddressError,
        match=rf"^device 2: use after free: read: address {a.address:#x} \(1024 bytes\) was freed at {freed}, "
        rf"allocated at {allocated}$",
    ):
        arena.resolve(a.address, 4, "read")
    with pytest.raises(IllegalAddressError, match=rf"address {a.address + 8:#x} inside address {a.address:#x}"):
        arena.resolve(a.address + 8, 4, "read")
    with pytest.raises(
        IllegalAddressError, match=rf"^device 2: double free: .* was freed at {freed}, allocated at {allocated}$"
    ):
        arena.free(a)


def test_foreign_host_null_and_unused_addresses_are_told_apart(arena):
    with pytest.raises(IllegalAddressError, match=r"wrong device: access: address 0x10003\w+ belongs to device 3$"):
        arena.resolve(base_address(3), 4)
    with pytest.raises(IllegalAddressError, match="address 0x7f0000001000 is a host address, not device memory"):
        arena.resolve(0x7F00_0000_1000, 4)
    with pytest.raises(IllegalAddressError, match="illegal memory access: send: address 0x0 is null"):
        arena.resolve(0, 4, "send")
    with pytest.raises(IllegalAddressError, match="was never allocated"):
        arena.resolve(BASE + 8 * MIB, 4)
    with pytest.raises(ArgumentError, match="access of -1 bytes"):
        arena.resolve(BASE, -1)


def test_only_the_first_address_of_an_allocation_can_be_freed(arena):
    a = arena.malloc(1024)
    with pytest.raises(IllegalAddressError, match="lies inside an allocation; give its first address"):
        arena.free_address(a.address + 512)
    with pytest.raises(IllegalAddressError, match="free: address 0x1000 is a host address"):
        arena.free_address(0x1000)
    arena.free_address(a.address)
    with pytest.raises(IllegalAddressError, match="double free"):
        arena.free_address(a.address)


def test_out_of_memory_says_what_is_left_and_who_holds_the_rest(arena):
    arena.malloc(60 * MIB)
    line = here(-1)
    with pytest.raises(
        OutOfMemoryError,
        match=rf"8388608 bytes asked for, 4194304 of 67108864 bytes left; largest allocations: 62914560 at {line}",
    ):
        arena.malloc(8 * MIB)
    assert OutOfMemoryError.code == 207001


def test_memory_that_is_left_in_pieces_is_said_to_be(arena):
    pieces = [arena.malloc(MIB) for _ in range(64)]
    for piece in pieces[::2]:
        arena.free(piece)
    with pytest.raises(OutOfMemoryError, match="33554432 of 67108864 bytes left in pieces that are too small"):
        arena.malloc(2 * MIB)
    arena.free(pieces[1])
    assert arena.malloc(3 * MIB).address == BASE


def test_a_negative_size_is_refused(arena):
    with pytest.raises(ArgumentError, match="cannot allocate -1 bytes"):
        arena.malloc(-1)


# ---------------------------------------------------------------------------------------------------------------- reuse
def test_a_freed_address_is_not_handed_out_again_at_once_but_in_time(arena):
    first = arena.malloc(512)
    arena.free(first)
    later = []
    while not later or later[-1] != first.address:
        a = arena.malloc(512)
        later.append(a.address)
        arena.free(a)
    assert len(later) == 257


def test_without_checks_a_freed_address_is_reused_at_once():
    arena = make(check="off")
    a = arena.malloc(512)
    arena.free(a)
    assert arena.malloc(512).address == a.address
    arena.close()


def test_strict_mode_reuses_an_address_only_when_memory_runs_out():
    arena = make(4 * MIB, check="strict")
    seen = set()
    for _ in range(4):
        a = arena.malloc(MIB)
        assert a.address not in seen
        seen.add(a.address)
        arena.free(a)
    assert arena.malloc(4 * MIB).address == BASE
    arena.close()


def test_strict_mode_fills_fresh_and_freed_memory_with_nans():
    arena = make(check="strict")
    a = arena.malloc(64)
    view = arena.resolve(a.address, 64)
    for kind in (np.float16, np.float32, np.float64):
        assert np.isnan(view.view(kind)).all()
    view[:] = 0
    arena.free(a)
    assert np.isnan(arena.bytes[:64].view(np.float32)).all()
    arena.close()


def test_default_mode_touches_no_memory(arena):
    for _ in range(100):
        arena.free(arena.malloc(300_000))
    assert resident(arena) == 0


def resident(arena):
    return os.fstat(arena.segment.descriptor()["fd"]).st_blocks * 512


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")
def test_free_memory_beyond_a_limit_goes_back_to_the_system_oldest_first(monkeypatch):
    monkeypatch.setattr("device.arena._WARM_BYTES", 2 * MIB)
    monkeypatch.setattr("device.arena._BINNED_BYTES", 0)
    arena = make(check="off")
    blocks = [arena.malloc(MIB) for _ in range(7)]  # every second one stays, so that the others do not join
    for a in blocks:
        arena.resolve(a.address, MIB)[:] = 1
    for a in blocks[::2]:
        arena.free(a)
    assert resident(arena) == 5 * MIB
    starts = [a.address - BASE for a in blocks[::2]]
    assert [int(arena.bytes[start]) for start in starts] == [0, 0, 1, 1]
    arena.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")
def test_strict_mode_keeps_addresses_but_not_their_pages(monkeypatch):
    monkeypatch.setattr("device.arena._STRICT_RESIDENT_BYTES", 2 * MIB)
    arena = make(check="strict")
    first = arena.malloc(MIB)
    arena.free(first)
    for _ in range(20):
        arena.free(arena.malloc(MIB))
    assert resident(arena) <= 3 * MIB
    with pytest.raises(IllegalAddressError, match="use after free"):
        arena.resolve(first.address, 4)
    arena.close()


def test_freed_neighbours_join_and_a_larger_block_may_begin_in_them(arena):
    pieces = [arena.malloc(20 * MIB) for _ in range(3)]
    for piece in pieces:
        arena.free(piece)
    big = arena.malloc(64 * MIB)
    assert big.address == BASE
    assert not big.fresh


def test_the_best_fitting_block_is_taken():
    arena = make(check="off")
    small, _, large, _ = (arena.malloc(n * 512) for n in (3, 1, 8, 1))
    arena.free(large)
    arena.free(small)
    assert arena.malloc(2 * 512).address == small.address
    arena.close()


def test_memory_is_fresh_only_where_nobody_was_before(arena):
    a = arena.malloc(MIB)
    assert a.fresh
    arena.free(a)
    assert not arena.malloc(64 * MIB).fresh


def test_used_counts_live_bytes_rounded_up(arena):
    a = arena.malloc(1)
    b = arena.malloc(513)
    assert arena.used == 512 + 1024
    arena.free(a)
    assert arena.used == 1024
    assert arena.live() == [b]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 30)), max_size=80),
    st.sampled_from(["default", "strict", "off"]),
)
def test_live_ranges_never_overlap_and_keep_their_content(steps, check):
    arena = make(MIB, check)
    held = []
    for number, (size, victim) in enumerate(steps):
        try:
            a = arena.malloc(size)
        except OutOfMemoryError:
            a = None
        if a is not None:
            arena.resolve(a.address, size)[:] = number % 251
            held.append((a, number % 251))
        if victim < len(held):
            gone, value = held.pop(victim)
            assert (arena.resolve(gone.address, gone.nbytes) == value).all()
            arena.free(gone)
            assert arena.find(gone.address) is not gone
    for a, value in held:
        assert (arena.resolve(a.address, a.nbytes) == value).all()
    assert arena.used == sum(a.size for a, _ in held)
    for a, _ in held:
        arena.free(a)
    assert arena.malloc(MIB).address == BASE, "all memory is one block again"
    arena.close()


def test_threads_may_allocate_and_free_at_once(arena):
    errors = []

    def work(value):
        try:
            for i in range(300):
                a = arena.malloc(64 + i % 7 * 512)
                view = arena.resolve(a.address, 64)
                view[:] = value
                assert (view == value).all()
                arena.free(a)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert arena.used == 0


def test_a_finalizer_that_runs_inside_malloc_does_not_deadlock(arena):
    a = arena.malloc(512, "array")
    with arena._lock:  # what malloc holds when the collector strikes
        arena.abandon(a)
    assert a.live
    assert arena.used == 0
    assert not a.live


# ---------------------------------------------------------------------------------------------------------------- close
def test_after_close_everything_says_closed():
    arena = make()
    a = arena.malloc(16)
    arena.close()
    arena.close()
    assert not a.live
    with pytest.raises(ClosedError, match="closed: cannot allocate 16 bytes"):
        arena.malloc(16)
    with pytest.raises(ClosedError, match="closed: access of 4 bytes"):
        arena.resolve(a.address, 4)
    with pytest.raises(ClosedError, match=r"closed: address .* \(16 bytes\) allocated at .* went away with its device"):
        raise a.dead()
