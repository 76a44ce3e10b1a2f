"""What goes wrong is said on every rank, in a sentence that names the ranks and prints the calls; nothing hangs.

Ranks are threads here; tests/processes kills and confuses real processes.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import threading
import time

import numpy as np
import pytest

import hccl
from device import DeviceError
from device.kernels import Cost, Kernel, scale
from hccl import waiting
from hccl.bootstrap import from_root_info, get_root_info
from hccl.root_info import ROOT_INFO_BYTES, RootInfo, open_root

LIMIT_S = 60  # of a run that hangs


@pytest.fixture
def impatient(monkeypatch):
    """Look for circles at once."""
    monkeypatch.setattr(waiting, "_CIRCLE_S", 0.02)
    monkeypatch.setattr(waiting, "_LOOK_S", 0.002)


def errors_of(function, ranks, **options):
    """Run `function(comm)` and return the error of each rank, None where there was none."""
    errors = [None] * ranks

    def work(comm):
        try:
            function(comm)
            comm.device.synchronize()
        except Exception as error:
            errors[comm.rank] = error
            raise

    with contextlib.suppress(Exception):
        hccl.run(work, ranks, timeout_s=LIMIT_S, **options)
    return errors


def ones(comm, count=4, dtype="float32"):
    return comm.device.array(np.ones(count), dtype)


# --------------------------------------------------------------------------------------------------------- disagreement
def in_other_order(comm):
    x = ones(comm)
    if comm.rank == 0:
        comm.all_reduce(x)
        comm.broadcast(x, 0)
    else:
        comm.broadcast(x, 0)
        comm.all_reduce(x)


def after_a_good_call(comm):
    comm.barrier()
    comm.all_gather(ones(comm, 4 + comm.rank // 2))


REDUCE = "all_reduce(4 float32, op sum, algorithm one-shot mesh)"
DISAGREEMENTS = {  # what rank 0 and the others call, as both must be printed
    "count": (
        lambda c: c.all_reduce(ones(c, 4 if c.rank else 5)),
        "all_reduce(5 float32, op sum, algorithm one-shot mesh)",
        REDUCE,
    ),
    "count, large": (
        lambda c: c.all_reduce(ones(c, 50_000 + c.rank // 2)),
        "all_reduce(50000 float32, op sum, algorithm mesh)",
        "all_reduce(50001 float32, op sum, algorithm mesh)",
    ),
    "dtype": (
        lambda c: c.all_reduce(ones(c, 4, "float32" if c.rank else "int32")),
        "all_reduce(4 int32, op sum, algorithm one-shot mesh)",
        REDUCE,
    ),
    "op": (
        lambda c: c.all_reduce(ones(c), op="sum" if c.rank else "max"),
        "all_reduce(4 float32, op max, algorithm one-shot mesh)",
        REDUCE,
    ),
    "root": (
        lambda c: c.broadcast(ones(c), 0 if c.rank else 1),
        "broadcast(4 float32, root 1, algorithm mesh)",
        "broadcast(4 float32, root 0, algorithm mesh)",
    ),
    "operation": (
        lambda c: c.broadcast(ones(c), 0) if c.rank else c.all_reduce(ones(c)),
        REDUCE,
        "broadcast(4 float32, root 0, algorithm mesh)",
    ),
    "order": (in_other_order, REDUCE, "broadcast(4 float32, root 0, algorithm mesh)"),
    "a later call": (
        after_a_good_call,
        "all_gather(4 float32, algorithm mesh) as collective #2",
        "all_gather(5 float32, algorithm mesh)",
    ),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_ranks_that_disagree_fail_on_every_rank_with_both_calls_printed(case):
    function, first, second = DISAGREEMENTS[case]
    for rank, error in enumerate(errors_of(function, 3)):
        assert type(error) is hccl.DisagreementError, error
        assert error.code == hccl.HcclResult.E_PARA
        assert str(error).startswith(f"rank {rank} called ")
        for call in (first.partition(" as ")[0], second):
            assert call in str(error)
    assert "hccl_world_group" in str(error)
    if " as " in first:
        assert "as collective #2 of" in str(error)


@pytest.mark.parametrize(
    ("sent", "received", "said"),
    [
        ((3, "float32"), (4, "float32"), ("send(3 float32) to rank 1", "recv(4 float32) from rank 0")),
        ((4, "int32"), (4, "float32"), ("send(4 int32) to rank 1", "recv(4 float32) from rank 0")),
    ],
    ids=["count", "dtype"],
)
def test_a_message_whose_ends_differ_fails_on_both(sent, received, said):
    def work(comm):
        if comm.rank == 0:
            comm.send(ones(comm, *sent), 1)
        else:
            comm.recv(ones(comm, *received), 0)

    for rank, error in enumerate(errors_of(work, 2)):
        assert type(error) is hccl.DisagreementError
        assert str(error).startswith(f"rank {rank} called {said[rank]}, but rank {1 - rank} called ")
        assert str(error).endswith(said[1 - rank])


def test_ends_of_a_message_in_a_batch_that_differ_fail_on_both():
    def work(comm):
        x, y = ones(comm, 8), ones(comm, 8 if comm.rank else 7)
        comm.batch_send_recv([("send", x, 1 - comm.rank), ("recv", y, 1 - comm.rank)])

    first, second = errors_of(work, 2)
    assert type(first) is hccl.DisagreementError
    assert "called recv(7 float32) from rank 1, but rank 1 called send(8 float32) to rank 0" in str(first)
    assert "recv(7 float32) from rank 1" in str(second)
    assert "send(8 float32) to rank 0" in str(second)


def test_an_error_is_raised_again_at_every_later_touch():
    seen = []

    def work(comm):
        x = ones(comm, 4 + comm.rank)
        comm.all_reduce(x)
        for touch in (comm.device.synchronize, x.numpy, lambda: comm.all_reduce(x), comm.barrier):
            with pytest.raises(hccl.DisagreementError) as caught:
                touch()
            seen.append((comm.rank, caught.value))
        raise caught.value

    errors_of(work, 2)
    assert len(seen) == 8
    assert len({id(error) for _, error in seen}) == 2


# -------------------------------------------------------------------------------------------------------------- circles
def test_sends_that_cross_are_a_deadlock_and_the_circle_is_printed(impatient):
    def work(comm):
        comm.send(ones(comm), 1 - comm.rank)
        comm.recv(ones(comm), 1 - comm.rank)

    found = errors_of(work, 2)
    circle = (
        "deadlock, no rank of this circle can go on: rank 0 waits for rank 1 in send(4 float32); "
        "rank 1 waits for rank 0 in send(4 float32)"
    )
    assert all(type(error) is hccl.DisagreementError and circle in str(error) for error in found)


def test_a_ring_of_receives_before_sends_is_a_deadlock(impatient):
    def work(comm):
        comm.recv(ones(comm), (comm.rank - 1) % 4)
        comm.send(ones(comm), (comm.rank + 1) % 4)

    for error in errors_of(work, 4):
        assert "deadlock" in str(error)
        for rank in range(4):
            assert f"rank {rank} waits for rank {(rank - 1) % 4} in recv(4 float32)" in str(error)


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_a_collective_against_a_message_is_a_deadlock(impatient, kind):
    def work(comm):
        if comm.rank == 0:
            getattr(comm, kind)(ones(comm), 1)
        else:
            comm.all_reduce(ones(comm))

    for error in errors_of(work, 2):
        assert f"rank 0 waits for rank 1 in {kind}(4 float32)" in str(error)
        assert f"rank 1 waits for rank 0 in {REDUCE}, its collective #1" in str(error)


def test_a_rank_that_computes_for_long_in_the_middle_of_a_collective_is_no_deadlock(impatient):
    """The ranks behind it in the chain wait meanwhile, some for their readers: there is no circle."""
    busy = Kernel("busy", lambda x, wall_s: time.sleep(wall_s), lambda x, wall_s: Cost(0, 0))

    def work(comm):
        d = comm.device
        y, x = d.zeros(4), d.array(np.full(40_000, comm.rank, "float32"))
        comm.barrier()
        d.synchronize()
        if comm.rank == 3:
            d.launch(busy, y, 0.05)  # the last to enter: rank 1 is blocked until then, and turns to its other stream
        comm.broadcast(x, 0)
        if comm.rank == 1:
            d.launch(busy, y, 0.3, stream=d.stream())
        return np.unique(x.numpy()).tolist()

    assert hccl.run(work, 4, config=hccl.Config(algo="ring"), timeout_s=LIMIT_S) == [[0.0]] * 4


# --------------------------------------------------------------------------------------------- peers that are not there
def test_a_peer_that_leaves_without_its_part_is_named():
    def work(comm):
        if comm.rank != 1:
            comm.all_reduce(ones(comm))

    first, second, third = errors_of(work, 3)
    assert second is None
    for error in (first, third):
        assert type(error) is hccl.BrokenError
        assert error.code == hccl.HcclResult.E_REMOTE
        assert "all_reduce #1 (4 float32, op sum, algorithm one-shot mesh)" in str(error)
        assert "rank 1" in str(error)
        assert "closed the communicator after 0 calls" in str(error)


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_a_message_whose_other_end_is_missing_names_the_peer(kind):
    def work(comm):
        comm.barrier()
        if comm.rank == 0:
            getattr(comm, kind)(ones(comm), 1)

    error, other = errors_of(work, 2)
    assert other is None
    assert type(error) is hccl.BrokenError
    assert re.search(
        rf"rank 0: {kind}\(4 float32\) \w+ rank 1 waits for rank 1, which closed .* after 1 calls", str(error)
    )


def test_an_exception_in_one_rank_is_the_error_of_the_run_and_the_others_quote_it():
    def work(comm):
        if comm.rank == 1:
            raise RuntimeError("mine, all mine")
        comm.all_reduce(ones(comm))

    first, second, third = errors_of(work, 3)
    assert str(second) == "mine, all mine"
    for error in (first, third):
        assert type(error) is hccl.BrokenError
        assert "rank 1 failed: raised RuntimeError: mine, all mine" in str(error)
    with pytest.raises(RuntimeError, match="mine, all mine"):
        hccl.run(work, 3, timeout_s=LIMIT_S)


def test_the_first_cause_is_repeated_not_the_chain():
    """Rank 2 waits for rank 1, which waits for rank 0, which failed."""

    def work(comm):
        if comm.rank == 0:
            raise ValueError("the cause")
        comm.recv(ones(comm), comm.rank - 1)

    _, second, third = errors_of(work, 3)
    for error in (second, third):
        assert type(error) is hccl.BrokenError
        assert "rank 0 failed: raised ValueError: the cause" in str(error)
    assert "rank 1 failed" not in str(third)


def test_a_wait_that_passes_its_limit_says_for_whom_and_for_what():
    done = threading.Event()

    def work(comm):
        if comm.rank == 1:
            done.wait(LIMIT_S)
        comm.all_reduce(ones(comm))

    errors = [None, None, None]

    def watched(comm):
        try:
            work(comm)
            comm.device.synchronize()
        except hccl.HcclError as error:
            errors[comm.rank] = error
            done.set()
            raise

    with pytest.raises(hccl.HcclError):
        hccl.run(watched, 3, config=hccl.Config(exec_timeout_s=0.2), timeout_s=LIMIT_S)
    late = [e for e in errors if isinstance(e, hccl.TimeoutError)]
    assert late
    assert all(isinstance(e, TimeoutError) and e.code == hccl.HcclResult.E_TIMEOUT for e in late)
    call = "all_reduce #1 (4 float32, op sum, algorithm one-shot mesh)"
    text = f"waited 0.2 s (exec_timeout_s, HCCL_EXEC_TIMEOUT) for rank 1 in {call}"
    assert all(text in str(e) for e in late)
    assert all(text in str(e) for e in errors)  # the others quote it


def test_a_receive_that_passes_its_limit_says_from_whom():
    done = threading.Event()

    def work(comm):
        if comm.rank == 1:
            done.wait(LIMIT_S)
            return
        try:
            comm.recv(ones(comm), 1)
            comm.device.synchronize()
        finally:
            done.set()

    with pytest.raises(hccl.TimeoutError, match=r"waited 0\.2 s .* for rank 1 in recv\(4 float32\) from rank 1"):
        hccl.run(work, 2, config=hccl.Config(exec_timeout_s=0.2), timeout_s=LIMIT_S)


def test_a_run_that_passes_its_limit_names_the_ranks_that_were_not_done():
    forever = threading.Event()
    with pytest.raises(hccl.TimeoutError, match=r"not done after 0\.3 s: rank 1 is in its own code; rank 2"):
        hccl.run(lambda comm: comm.rank and forever.wait(LIMIT_S / 2), 3, timeout_s=0.3)
    forever.set()


def test_abort_lets_go_at_once_and_gives_the_reason():
    def work(comm):
        x = ones(comm)
        if comm.rank == 0:
            comm.all_reduce(x)
            comm.abort("found a better use of its time")
            comm.abort("again")
            assert comm.closed
            with pytest.raises(hccl.ClosedError, match="which is aborted here"):
                comm.barrier()
        else:
            comm.recv(x, 0)

    first, second, third = errors_of(work, 3)
    assert type(first) is hccl.ClosedError  # the call that was queued here
    for error in (second, third):
        assert type(error) is hccl.BrokenError
        assert "rank 0 failed: found a better use of its time" in str(error)


def test_a_failing_kernel_drops_what_is_queued_behind_it_and_tells_the_peers():
    ran = []

    def explode(x):
        raise ArithmeticError("kernel gone wrong")

    bad = Kernel("bad", explode, lambda x: Cost(0, 0))
    late = Kernel("late", lambda x: ran.append(1), lambda x: Cost(0, 0))

    def work(comm):
        x = ones(comm)
        if comm.rank == 0:
            comm.device.launch(bad, x)
        comm.all_reduce(x)
        if comm.rank == 0:
            comm.device.launch(late, x)
        comm.device.synchronize()

    # Lazy: nothing runs before all is queued.
    first, second = errors_of(work, 2, order="lazy")
    assert str(first) == "kernel gone wrong"
    assert type(second) is hccl.BrokenError
    assert "rank 0" in str(second)
    assert "kernel gone wrong" in str(second)
    assert not ran


def test_a_failing_call_does_not_touch_other_streams():
    def work(comm):
        d = comm.device
        other = d.stream()
        x = ones(comm)
        comm.all_reduce(ones(comm, 4 + comm.rank))
        d.launch(scale, x, 3.0, out=x, stream=other)
        with pytest.raises(hccl.DisagreementError):
            d.default_stream.synchronize()
        other.synchronize()
        results.append(x.numpy().tolist())
        comm.abort()

    results = []
    errors_of(work, 2)
    assert results == [[3.0] * 4] * 2


# ------------------------------------------------------------------------------------------------------------ root info
def join(n_ranks, calls, timeout_s=LIMIT_S):
    """Let threads join: calls are (info, n_ranks, rank, config). Return what each got, in order."""
    results = [None] * len(calls)

    def work(i, info, size, rank, config):
        try:
            results[i] = from_root_info(size, info, rank, config=config)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i, *call)) for i, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    for result in results:
        if isinstance(result, hccl.Communicator):
            result.close()
    return results


QUICK = hccl.Config(connect_timeout_s=20)


def test_root_info_brings_ranks_together():
    info = get_root_info(20)
    assert len(info) == ROOT_INFO_BYTES == 4108
    found = join(3, [(info, 3, rank, QUICK) for rank in (2, 0, 1)])
    assert [comm.rank for comm in found] == [2, 0, 1]
    assert len({comm.name for comm in found}) == 1


def test_members_that_expect_different_numbers_of_ranks_are_told():
    info = get_root_info(20)
    for error in join(2, [(info, 2, 0, QUICK), (info, 3, 1, QUICK)]):
        assert type(error) is hccl.DisagreementError
        text = str(error)
        assert "rank 0 expects 2" in text
        assert "rank 1 expects 3" in text


def test_two_members_with_one_rank_are_told():
    info = get_root_info(20)
    found = join(2, [(info, 2, 1, QUICK), (info, 2, 1, QUICK)])
    assert all(type(error) is hccl.ArgumentError for error in found)
    assert any("two processes claim rank 1: pid" in str(error) for error in found)
    assert any("rank 1 has connected already" in str(error) for error in found)


def test_members_with_different_configurations_are_told():
    info = get_root_info(20)
    other = hccl.Config(connect_timeout_s=20, algo="ring")
    for error in join(2, [(info, 2, 0, QUICK), (info, 2, 1, other)]):
        assert type(error) is hccl.DisagreementError
        assert "algo=auto" in str(error)
        assert "algo=ring" in str(error)


def test_ranks_that_never_come_are_named_at_the_limit():
    info = get_root_info(0.3)
    for error in join(4, [(info, 4, 0, QUICK), (info, 4, 2, QUICK)]):
        assert type(error) is hccl.TimeoutError
        assert "ranks 1, 3 did not come within 0.3 s; present: ranks 0, 2" in str(error)


def test_a_stranger_is_dropped_and_the_members_meet_nevertheless():
    info = get_root_info(20)
    root = RootInfo.unpack(info)
    member = {"token": "00" * 16, "member": {"rank": 0, "n_ranks": 2, "host": "", "pid": 1, "device_id": 0, "base": 0}}
    for words in (json.dumps(member).encode() + b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"[1]\n", b""):
        with socket.create_connection((root.address, root.port)) as stranger:
            stranger.settimeout(LIMIT_S)
            stranger.sendall(words)
            if words.endswith(b"\n"):
                assert stranger.recv(1) == b""  # closed, without a word
    silent = socket.create_connection((root.address, root.port))
    found = join(2, [(info, 2, 0, QUICK), (info, 2, 1, QUICK)])
    silent.close()
    assert [comm.rank for comm in found] == [0, 1]


def test_members_that_come_after_a_meeting_has_failed_hear_why():
    info = get_root_info(20)
    join(3, [(info, 3, 0, QUICK), (info, 4, 1, QUICK)])
    (error,) = join(3, [(info, 3, 2, QUICK)])
    assert type(error) is hccl.DisagreementError
    assert str(error).startswith("rank 2: making the communicator: ")
    assert "rank 1 expects 4" in str(error)


def test_a_member_that_goes_away_before_the_others_have_come_is_named():
    info = get_root_info(20)
    root = RootInfo.unpack(info)
    member = {"rank": 1, "n_ranks": 2, "host": "h", "pid": 4711, "device_id": 0, "base": 0, "config": QUICK.shared()}
    with socket.create_connection((root.address, root.port)) as leaver:
        leaver.sendall(json.dumps({"token": root.token.hex(), "member": member}).encode() + b"\n")
    (error,) = join(2, [(info, 2, 0, QUICK)])
    assert type(error) is hccl.BrokenError
    assert "rank 1 (pid 4711) went away" in str(error)


def test_root_info_is_good_for_one_communicator_only():
    info = get_root_info(20)
    join(1, [(info, 1, 0, QUICK)])
    (error,) = join(1, [(info, 1, 0, QUICK)])
    assert type(error) is hccl.BrokenError
    assert error.code == hccl.HcclResult.E_TCP_CONNECT
    assert "does not answer" in str(error)
    assert "was this root info used before?" in str(error)


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (b"", "root info is 4108 bytes from get_root_info(), got 0 bytes"),
        (bytes(4108), "these bytes are not root info"),
        (bytes(4107), "got 4107 bytes"),
        ("text", "got 4 bytes"),
        (7, "got int"),
    ],
    ids=["nothing", "zeros", "too short", "text", "number"],
)
def test_bytes_that_are_not_root_info_are_refused(info, text):
    with pytest.raises(hccl.ArgumentError, match=re.escape(text)):
        from_root_info(2, info, 0)


def test_ranks_out_of_range_are_refused_before_anybody_is_asked():
    info = open_root(0.1)
    with pytest.raises(hccl.ArgumentError, match="rank is from 0 to 1, got 2"):
        from_root_info(2, info, 2)
    with pytest.raises(hccl.ArgumentError, match="n_ranks is a number of ranks, got 0"):
        from_root_info(0, info, 0)


@pytest.mark.parametrize(
    ("variable", "text"),
    [("HCCL_CONNECT_TIMEOUT", "60"), ("HCCL_EXEC_TIMEOUT", "soon"), ("HCCL_BUFFSIZE", "0"), ("HCCL_BUFFSIZE", "-1")],
)
def test_variables_that_hccl_would_refuse_are_refused(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(hccl.ArgumentError, match=f"{variable}='{text}': expected an integer from "):
        hccl.run(print, 1)


# ------------------------------------------------------------------------------------------------- found by breaking it
def test_a_buffer_freed_under_a_queued_call_is_an_error_and_not_a_wrong_result():
    def work(comm):
        x = ones(comm)
        if comm.rank == 0:
            gate = comm.device.stream()
            comm.device.default_stream.wait(gate.record())
        comm.all_reduce(x)
        if comm.rank == 0:
            x.free()
        comm.device.synchronize()

    first, second = errors_of(work, 2, order="lazy")
    assert isinstance(first, DeviceError)
    assert "all_reduce: freed while queued" in str(first)
    assert isinstance(second, hccl.BrokenError)


def test_a_call_after_a_failed_one_on_another_stream_fails_too():
    def work(comm):
        one, other = comm.device.stream(), comm.device.stream()
        comm.all_reduce(ones(comm, 4 + comm.rank), stream=one)
        comm.all_reduce(ones(comm), stream=other)
        for stream in (other, one):
            with pytest.raises(hccl.DisagreementError, match=r"4 float32.*5 float32|5 float32.*4 float32"):
                stream.synchronize()
        raise KeyError("both streams have failed")

    assert all(isinstance(error, KeyError) for error in errors_of(work, 2, order="lazy"))


def test_a_batch_whose_rank_is_busy_elsewhere_is_not_taken_for_a_deadlock():
    """Rank 0's sends are served while its scheduler is in a kernel of another stream: it can go on, it only has not."""
    kernel = Kernel("busy", lambda x: time.sleep(1.5), lambda x: Cost(0, 0))

    def work(comm):
        x, y, z = ones(comm), ones(comm), ones(comm)
        if comm.rank == 0:
            comm.batch_send_recv([("send", x, 1), ("send", y, 1), ("recv", z, 1)])
            comm.device.launch(kernel, z, stream=comm.device.stream())
        else:
            for a in (x, y):
                comm.recv(a, 0)
            comm.device.synchronize()
            comm.send(z, 0)
        comm.device.synchronize()
        return z.numpy().tolist()

    assert hccl.run(work, 2, timeout_s=LIMIT_S) == [[1.0] * 4] * 2


def test_sys_exit_in_a_rank_does_not_end_the_program():
    assert hccl.run(lambda comm: sys.exit(0) if comm.rank else "here", 2) == ["here", None]
    with pytest.raises(hccl.HcclError, match=r"rank 1 called sys\.exit\(3\)"):
        hccl.run(lambda comm: sys.exit(3) if comm.rank else None, 2)


@pytest.mark.parametrize("order", ["eager", "lazy"])
def test_polling_a_stream_gets_it_done_even_when_no_thread_does(order):
    def work(comm):
        x = ones(comm)
        comm.all_reduce(x)
        while not comm.device.default_stream.query():
            time.sleep(0)
        return x.numpy()[0]

    assert hccl.run(work, 2, order=order, progress="inline", timeout_s=LIMIT_S) == [2.0, 2.0]
