"""What a user of a communicator sees: results to the bit, arrays, streams, sub-communicators, errors of wrong calls.

Ranks are threads of this process (`hccl.run`). Numbers are small integers, so that every sum and product is exact in
every type and the NumPy oracle below can be compared with ==.
"""

from __future__ import annotations

import itertools
import threading

import ml_dtypes
import numpy as np
import pytest

import hccl
from device import Device, IllegalAddressError
from device.kernels import scale
from hccl.record import ALIVE, CLOSED, Board, key_of

REDUCED = ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32")  # by HCCL on the A2
MOVED = (*REDUCED, "uint8", "uint16", "uint32", "uint64", "float64")
NO_PROD = ("int16", "bfloat16")
RANKS = (1, 2, 3, 4, 5, 8)
ALGOS = ("auto", "mesh", "ring")
LIMIT_S = 120  # of a run that hangs


def run(function, ranks, algo="auto", **options):
    return hccl.run(function, ranks, config=hccl.Config(algo=algo), timeout_s=LIMIT_S, **options)


def numpy_type(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def integers(seed, shape, dtype, low=-3, high=4):
    low = max(low, 0) if dtype.startswith("u") else low
    return np.random.default_rng(seed).integers(low, high, shape).astype(numpy_type(dtype))


def combined(op, inputs):
    """Combine the inputs of all ranks: in int64 or float64, rounded (or wrapped) once."""
    kind = inputs[0].dtype
    wide = np.int64 if kind.kind in "iu" else np.float64
    ufunc = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]
    return ufunc.reduce(np.stack([x.astype(wide) for x in inputs])).astype(kind)


def same(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes() or np.array_equal(got, expected)  # -0.0 == 0.0


# -------------------------------------------------------------------------------------------------------------- results
def cases(types, ranks, algo):
    """Give each type a count: 0, 1, fewer than ranks, not divisible, more than a tile; each algorithm other pairs."""
    counts = (0, 1, max(ranks - 1, 1), 7 * ranks + 1, 70001)
    shift = RANKS.index(ranks) + 2 * ALGOS.index(algo)
    return [(dtype, counts[(i + shift) % len(counts)]) for i, dtype in enumerate(types)]


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("ranks", RANKS)
def test_reductions_of_every_type(ranks, algo):
    def work(comm):
        d, me, found = comm.device, comm.rank, []
        for dtype, count in cases(REDUCED, ranks, algo):
            mine = integers([me, count], count, dtype)
            whole = integers([me, count, 1], count * ranks, dtype)
            for op in ("sum", "max", "min", "prod"):
                if op == "prod" and dtype in NO_PROD:
                    continue
                root = (count + len(op)) % ranks
                y = comm.reduce(d.array(mine), root, op=op)
                found += [
                    comm.all_reduce(d.array(mine), op=op).numpy(),
                    comm.reduce_scatter(d.array(whole), op=op).numpy(),
                    None if y is None else y.numpy(),
                ]
        return found

    results = iter(zip(*run(work, ranks, algo), strict=True))
    for dtype, count in cases(REDUCED, ranks, algo):
        parts = [integers([r, count], count, dtype) for r in range(ranks)]
        wholes = [integers([r, count, 1], count * ranks, dtype) for r in range(ranks)]
        for op in ("sum", "max", "min", "prod"):
            if op == "prod" and dtype in NO_PROD:
                continue
            root = (count + len(op)) % ranks
            total = combined(op, parts)
            for got in next(results):
                same(got, total)
            for got, expected in zip(next(results), combined(op, wholes).reshape(ranks, count), strict=True):
                same(got, expected)
            for rank, got in enumerate(next(results)):
                assert (got is None) == (rank != root)
                if got is not None:
                    same(got, total)


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("ranks", RANKS)
def test_moves_of_every_type(ranks, algo):
    def work(comm):
        d, me, found = comm.device, comm.rank, []
        for dtype, count in cases(MOVED, ranks, algo):
            mine = integers([me, count], count, dtype, high=100)
            whole = integers([me, count, 1], count * ranks, dtype, high=100)
            root = count % ranks
            part = d.empty(count, dtype)
            from_left = d.empty(count, dtype)
            left, right = (me - 1) % ranks, (me + 1) % ranks
            comm.batch_send_recv([("recv", from_left, left), ("send", d.array(mine), right)])
            found += [
                comm.all_gather(d.array(mine)).numpy(),
                comm.broadcast(d.array(mine), root).numpy(),
                comm.scatter(d.array(whole) if me == root else None, root, part).numpy(),
                comm.all_to_all(d.array(whole)).numpy(),
                from_left.numpy(),
            ]
        comm.barrier()
        return found

    results = iter(zip(*run(work, ranks, algo), strict=True))
    for dtype, count in cases(MOVED, ranks, algo):
        parts = [integers([r, count], count, dtype, high=100) for r in range(ranks)]
        wholes = [integers([r, count, 1], count * ranks, dtype, high=100) for r in range(ranks)]
        split = [w.reshape(ranks, count) for w in wholes]
        root = count % ranks
        expected = (
            [np.concatenate(parts)] * ranks,
            [parts[root]] * ranks,
            split[root],
            [np.concatenate([split[source][rank] for source in range(ranks)]) for rank in range(ranks)],
            [parts[(rank - 1) % ranks] for rank in range(ranks)],
        )
        for wanted in expected:
            for got, one in zip(next(results), wanted, strict=True):
                same(got, one)


@pytest.mark.parametrize(
    "options",
    [{"check": "strict"}, {"check": "off"}, {"progress": "inline"}, {"check": "strict", "progress": "inline"}],
    ids=str,
)
@pytest.mark.parametrize("algo", ["mesh", "ring"])
def test_in_place_out_of_place_and_own_part_at_odd_offsets(algo, options):
    ranks, count = 3, 1001
    parts = [integers(r, count, "float32") for r in range(ranks)]
    wholes = [integers([r, 1], count * ranks, "float32") for r in range(ranks)]

    def work(comm):
        d, me = comm.device, comm.rank
        own = slice(me * count, (me + 1) * count)

        def odd(size):
            """A view that starts 4 bytes after an aligned address and has canaries around it."""
            room = d.array(np.full(size + 2, 777, "float32"))
            rooms.append(room)
            return room[1:-1]

        rooms = []
        found = {}
        x, y = odd(count), odd(count)
        x.copy_from(parts[me])
        assert comm.all_reduce(x, y) is y
        found["x is left alone"], found["all_reduce"] = x.numpy(), y.numpy()
        assert comm.all_reduce(x) is x
        found["all_reduce in place"] = x.numpy()
        whole = odd(count * ranks)
        whole[own].copy_from(parts[me])
        assert comm.all_gather(whole[own], whole) is whole
        found["all_gather of own part"] = whole.numpy()
        whole.copy_from(wholes[me])
        out = odd(count)
        assert comm.reduce_scatter(whole, out) is out
        found["reduce_scatter"] = out.numpy()
        found["reduce_scatter into own part"] = comm.reduce_scatter(whole, whole[own]).numpy()
        whole.copy_from(wholes[me])
        found["scatter into own part"] = comm.scatter(whole, 1, whole[own] if me == 1 else out).numpy()
        whole.copy_from(wholes[me])
        found["all_to_all"] = comm.all_to_all(whole, odd(count * ranks)).numpy()
        x.copy_from(parts[me])
        found["reduce in place"] = None if comm.reduce(x, 2, x) is None else x.numpy()
        x.copy_from(parts[me])
        found["broadcast"] = comm.broadcast(x, 2).numpy()
        y = odd(count)
        comm.batch_send_recv([("send", x, (me + 1) % ranks), ("recv", y, (me - 1) % ranks)])
        found["batch"] = y.numpy()
        for room in rooms:
            assert room.numpy()[[0, -1]].tolist() == [777, 777]
        return found

    total, sums = sum(parts), sum(wholes).reshape(ranks, count)
    for rank, found in enumerate(run(work, ranks, algo, **options)):
        sent = [w.reshape(ranks, count)[rank] for w in wholes]
        expected = {
            "x is left alone": parts[rank],
            "all_reduce": total,
            "all_reduce in place": total,
            "all_gather of own part": np.concatenate(parts),
            "reduce_scatter": sums[rank],
            "reduce_scatter into own part": sums[rank],
            "scatter into own part": sent[1],
            "all_to_all": np.concatenate(sent),
            "reduce in place": total if rank == 2 else None,
            "broadcast": parts[2],
            "batch": parts[2],
        }
        assert found.keys() == expected.keys()
        for name, got in found.items():
            assert np.array_equal(got, expected[name]), name


def test_some_ranks_call_in_place_and_some_do_not():
    def work(comm):
        x = comm.device.array(np.full(5000, comm.rank + 1, "int32"))
        out = comm.device.empty(5000, "int32") if comm.rank % 2 else None
        return np.unique(comm.all_reduce(x, out).numpy()).tolist()

    for algo in ALGOS:
        assert run(work, 4, algo) == [[10]] * 4


def test_ranks_may_use_other_arrays_in_each_call_while_their_peers_do_not():
    """What a rank prepared for its peers' buffers must not outlive them."""

    def work(comm):
        d = comm.device
        same, found = d.empty(9000, "int32"), []
        others = [d.empty(9000, "int32") for _ in range(3)]
        gathered = d.empty(18000 if comm.rank else 27000, "int32")
        for turn in range(8):
            x = others[turn % 3] if comm.rank == 1 else same
            x.copy_from(np.full(9000, comm.rank + turn, "int32"))
            comm.all_reduce(x)
            found.append(np.unique(x.numpy()).tolist())
            start = turn * 50 if comm.rank == 0 else 0
            out = gathered[start : start + 18000]
            comm.all_gather(x, out)
            found.append(np.unique(out.numpy()).tolist())
        return found

    for algo in ALGOS:
        assert run(work, 2, algo) == [[[1 + 2 * turn] for turn in range(8) for _ in range(2)]] * 2


def test_shapes_follow_the_first_axis():
    def work(comm):
        x = comm.device.zeros((6, 5), "float16")
        scalar = comm.device.array(np.float32(2))
        part = comm.device.empty((3, 5), "float16")
        return (
            comm.all_reduce(x).shape,
            comm.all_gather(x).shape,
            comm.reduce_scatter(x).shape,
            comm.all_to_all(x).shape,
            comm.scatter(x if comm.rank == 1 else None, 1, part).shape,
            comm.all_gather(scalar).shape,
            comm.all_reduce(scalar).numpy().item(),
            comm.all_gather(comm.device.zeros((0, 5))).shape,
        )

    assert run(work, 2) == [((6, 5), (12, 5), (3, 5), (6, 5), (3, 5), (2,), 4.0, (0, 5))] * 2


@pytest.mark.parametrize("algo", ALGOS)
def test_sums_that_round_are_the_same_bits_on_every_rank_and_in_every_run(algo):
    def work(comm):
        found = []
        for dtype, count in itertools.product(("float32", "float16", "bfloat16"), (999, 50_000)):
            host = np.random.default_rng(comm.rank).normal(size=count).astype(numpy_type(dtype))
            found += [comm.all_reduce(comm.device.array(host)).numpy().tobytes() for _ in range(2)]
        return found

    first, second = run(work, 5, algo), run(work, 5, algo)
    assert all(one == first[0] for one in first + second)
    assert first[0][0::2] == first[0][1::2]


def test_half_types_are_summed_in_float32_and_rounded_once():
    def work(comm):
        x = comm.device.array(np.array([2048, 1, 1, 1][comm.rank : comm.rank + 1], "float16"))
        return comm.all_reduce(x).numpy().item()

    assert run(work, 4) == [2052.0] * 4  # in float16 steps 2048 + 1 stays 2048; 2051 rounds to 2052


def test_reduce_ops_may_be_given_by_name_or_by_number():
    def work(comm):
        x = comm.device.array(np.array([comm.rank + 2], "int64"))
        out = comm.device.empty(1, "int64")
        ops = ("sum", "prod", "MAX", hccl.ReduceOp.MIN)
        return [comm.all_reduce(x, out, op=op).numpy().item() for op in ops]

    assert run(work, 3) == [[9, 24, 4, 2]] * 3


def test_numbers_overflow_without_a_word_as_on_the_chip(recwarn):
    def work(comm):
        x = comm.device.array(np.array([100, -128], "int8"))
        y = comm.device.array(np.array([60000], "float16"))
        return comm.all_reduce(x).numpy().tolist(), comm.all_reduce(y).numpy().tolist()

    assert run(work, 2) == [([-56, 0], [np.inf])] * 2
    assert not recwarn.list


# -------------------------------------------------------------------------------------------------------------- streams
def test_reading_waits_for_what_was_queued():
    """Strict devices start nothing before somebody waits: only numpy() can have made the result."""

    def work(comm):
        x = comm.device.array(np.ones(1000, "float32"))
        comm.all_reduce(x)
        comm.device.launch(scale, x, 3.0, out=x)
        comm.all_reduce(x)
        return x.numpy()[[0, -1]].tolist()

    assert run(work, 3, check="strict") == [[27.0, 27.0]] * 3


@pytest.mark.parametrize("order", ["eager", "lazy"])
def test_calls_on_several_streams_keep_the_order_of_the_host(order):
    def work(comm):
        d = comm.device
        streams = [d.stream() for _ in range(3)]
        arrays = [d.array(np.full(n, comm.rank + n, "int32")) for n in (1, 5000, 40, 70001, 3, 900)]
        for i, x in enumerate(arrays):
            comm.all_reduce(x, stream=streams[(i + comm.rank) % 3])  # ranks need not choose the same ones
        comm.barrier(streams[0])
        for stream in streams[:: -1 if comm.rank else 1]:
            stream.synchronize()
        return [np.unique(x.numpy()).tolist() for x in arrays]

    assert run(work, 3, order=order) == [[[3 + 3 * n] for n in (1, 5000, 40, 70001, 3, 900)]] * 3


def test_communicators_on_streams_of_their_own_overlap():
    """Rank 0 enters a on stream 1 and b on stream 2; rank 1 waits for b before it enters a."""

    def work(comm):
        other = comm.sub([0, 1])
        d = comm.device
        one, two = d.stream(), d.stream()
        x, y = d.array(np.ones(3, "float32")), d.array(np.ones(3, "float32"))
        if comm.rank == 0:
            comm.all_reduce(x, stream=one)
            other.all_reduce(y, stream=two)
        else:
            other.all_reduce(y, stream=two)
            two.synchronize()
            comm.all_reduce(x, stream=one)
        result = x.numpy().tolist() + y.numpy().tolist()
        other.close()
        return result

    assert run(work, 2) == [[2.0] * 6] * 2


def test_a_call_is_queued_and_does_not_wait():
    """Rank 0 finds its call unfinished, since rank 1 makes its own only after rank 0 has looked."""
    looked = threading.Event()

    def work(comm):
        if comm.rank == 1:
            assert looked.wait(LIMIT_S)
        x = comm.all_reduce(comm.device.array(np.ones(3, "float32")))
        if comm.rank == 0:
            assert not comm.device.default_stream.query()
            looked.set()
        return x.numpy().tolist()

    assert run(work, 2) == [[2.0] * 3] * 2


# -------------------------------------------------------------------------------------------------- messages and groups
def test_items_of_a_batch_may_stand_in_any_order():
    def work(comm):
        d, me, size = comm.device, comm.rank, comm.size
        gets = {p: d.empty(4, "int32") for p in range(size)}
        items = [("send", d.array(np.full(4, 10 * me + p, "int32")), p) for p in range(size)]
        items += [("recv", gets[p], p) for p in range(size)]
        np.random.default_rng(me).shuffle(items)
        comm.batch_send_recv(items)
        return [gets[p].numpy()[0].item() for p in range(size)]

    assert run(work, 4) == [[10 * p + me for p in range(4)] for me in range(4)]


def test_messages_between_two_ranks_arrive_in_order():
    def work(comm):
        d = comm.device
        if comm.rank == 0:
            comm.batch_send_recv([("send", d.array(np.array([n])), 1) for n in range(5)])
            for n in range(5, 8):
                comm.send(d.array(np.array([n])), 1)
            return None
        gets = [d.empty(1, "int64") for _ in range(8)]
        for x in gets[:3]:
            comm.recv(x, 0)
        comm.batch_send_recv([("recv", x, 0) for x in gets[3:]])
        return [x.numpy().item() for x in gets]

    assert run(work, 2)[1] == list(range(8))


def test_a_group_is_one_batch():
    def work(comm):
        d, me = comm.device, comm.rank
        x, y, own = d.array(np.array([me])), d.empty(1, "int64"), d.empty(1, "int64")
        with comm.group():
            comm.send(x, (me + 1) % comm.size)
            comm.send(x, me)
            comm.recv(y, (me - 1) % comm.size)
            comm.recv(own, me)
        with comm.group():
            pass
        return y.numpy().item(), own.numpy().item()

    assert run(work, 3) == [(2, 0), (0, 1), (1, 2)]


def test_a_group_that_raises_sends_nothing():
    def work(comm):
        def fail():
            with comm.group():
                comm.send(comm.device.zeros(3), 1 - comm.rank)
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            fail()
        with comm.group(), pytest.raises(hccl.ArgumentError, match=r"group\(\) inside group\(\)"), comm.group():
            pass
        stream = comm.device.stream()
        with comm.group(), pytest.raises(hccl.ArgumentError, match="takes the stream of the group"):
            comm.send(comm.device.zeros(3), 1 - comm.rank, stream=stream)
        comm.barrier()
        comm.device.synchronize()
        return comm.bytes_sent()

    assert run(work, 2) == [{1: 32}, {0: 32}]  # the barrier's 8 float32 and nothing else


def test_a_barrier_waits_for_all_in_real_order():
    """What a rank did before the barrier is there for the others after it."""
    seen = [0, 0, 0]

    def work(comm):
        for turn in range(20):
            seen[comm.rank] = turn
            comm.barrier()
            comm.device.synchronize()
            assert min(seen) >= turn
            comm.barrier()
            comm.device.synchronize()

    run(work, 3)


# --------------------------------------------------------------------------------------------------------------- counts
@pytest.mark.parametrize(
    ("algo", "call", "expected"),
    [
        ("mesh", "all_reduce", {1: 2 * 4096, 2: 2 * 4096, 3: 2 * 4096}),  # one chunk of 4 twice to each
        ("auto", "all_reduce", {1: 16384, 2: 16384, 3: 16384}),  # one shot: everything to each
        ("ring", "all_reduce", {1: 6 * 4096}),  # 2 (P - 1) chunks to the right
        ("mesh", "all_gather", {1: 16384, 2: 16384, 3: 16384}),
        ("ring", "all_gather", {1: 3 * 16384}),
        ("mesh", "reduce_scatter", {1: 4096, 2: 4096, 3: 4096}),
        ("ring", "reduce_scatter", {1: 3 * 4096}),
        ("mesh", "all_to_all", {1: 4096, 2: 4096, 3: 4096}),
        ("mesh", "broadcast", {1: 2 * 4096, 2: 2 * 4096, 3: 2 * 4096}),  # the chunk of each, then the own chunk
        ("ring", "broadcast", {1: 16384}),
        ("mesh", "scatter", {1: 4096, 2: 4096, 3: 4096}),
        ("ring", "scatter", {1: 3 * 4096}),
        ("mesh", "send", {2: 16384}),
    ],
)
def test_bytes_sent_are_those_of_the_schedule(algo, call, expected):
    """Rank 0 of 4, with 16 KiB in x."""

    def work(comm):
        x = comm.device.zeros(4096, "float32")
        for _ in range(2):
            if call == "send":
                if comm.rank in (0, 2):
                    getattr(comm, "recv" if comm.rank else "send")(x, 2 - comm.rank)
            elif call == "scatter":
                comm.scatter(x if comm.rank == 0 else None, 0, comm.device.empty(1024))
            elif call == "broadcast":
                comm.broadcast(x, 0)
            else:
                getattr(comm, call)(x)
        comm.device.synchronize()
        return comm.bytes_sent()

    assert run(work, 4, algo)[0] == {peer: 2 * nbytes for peer, nbytes in expected.items()}


def test_bytes_sent_of_a_sum_that_does_not_divide_are_what_is_there():
    def work(comm):
        comm.all_reduce(comm.device.zeros(100, "float32"))  # slices of 128 bytes: 128, 128, 128 and 16
        comm.device.synchronize()
        return comm.bytes_sent()

    found = run(work, 4, "mesh")
    assert found[0] == {1: 256, 2: 256, 3: 144}
    assert found[3] == {0: 144, 1: 144, 2: 144}


# ---------------------------------------------------------------------------------------------------- sub-communicators
def test_split_orders_by_key_and_then_by_rank():
    def work(comm):
        odd = comm.split(comm.rank % 2, key=-comm.rank)
        none = comm.split(None if comm.rank == 3 else 7)
        ranks = odd.all_gather(comm.device.array(np.array([comm.rank]))).numpy().tolist()
        result = odd.rank, odd.size, ranks, None if none is None else none.size
        odd.close()
        if none is not None:
            none.close()
        return result

    assert run(work, 5) == [
        (2, 3, [4, 2, 0], 4),
        (1, 2, [3, 1], 4),
        (1, 3, [4, 2, 0], 4),
        (0, 2, [3, 1], None),
        (0, 3, [4, 2, 0], 4),
    ]


def test_a_sub_of_a_sub_counts_its_own_ranks():
    def work(comm):
        outer = comm.sub([3, 1, 2])
        if outer is None:
            return None
        inner = outer.sub([2, 0])
        with outer:
            if inner is None:
                return "outer", outer.rank
            with inner:
                got = inner.all_gather(comm.device.array(np.array([comm.rank]))).numpy().tolist()
                return inner.rank, inner.size, got

    assert run(work, 4) == [None, ("outer", 1), (0, 2, [2, 3]), (1, 2, [2, 3])]


def test_only_members_call_sub_and_disjoint_groups_work_at_once():
    def work(comm):
        half = comm.sub([0, 1] if comm.rank < 2 else [2, 3])
        with half:
            x = comm.device.array(np.full(3000, comm.rank, "int32"))
            for _ in range(10):
                half.all_reduce(x, op="max")
            return x.numpy()[0].item(), half.topology.ranks

    assert run(work, 4) == [(1, 2), (1, 2), (3, 2), (3, 2)]


def test_two_subs_of_the_same_ranks_are_two_communicators():
    def work(comm):
        a, b = comm.sub([0, 1]), comm.sub([0, 1])
        assert a.name != b.name
        x = comm.device.array(np.array([1.0]), dtype="float32")
        a.all_reduce(x)
        b.all_reduce(x)
        a.close()
        b.all_reduce(x)
        b.close()
        comm.all_reduce(x)
        return x.numpy().item()

    assert run(work, 2) == [16.0, 16.0]


def test_a_name_that_is_in_use_is_refused():
    def work(comm):
        first = comm.sub([0, 1], "experts")
        with pytest.raises(hccl.ArgumentError, match="a communicator named 'experts' exists already"):
            comm.sub([0, 1], "experts")
        first.close()
        again = comm.sub([0, 1], "experts")
        again.barrier()
        again.close()

    run(work, 2)


def test_a_thousand_communicators_leave_nothing():
    def work(comm):
        offsets, free = set(), comm.device.memory_info().free
        x = comm.device.array(np.array([1], "int64"))
        for i in range(1000):
            with comm.sub([0, 1]) as sub:
                offsets.add(sub.record.offset)
                if i % 100 == 0:
                    sub.all_reduce(x)
        assert comm.device.memory_info().free >= free - 512
        return len(offsets), x.numpy().item()

    for places, value in run(work, 2):
        assert places < 100
        assert value == 2**10


def test_a_board_uses_the_places_of_old_records_again_but_not_at_once():
    board = Board.create("test")
    offsets = []
    for i in range(6000):
        key = key_of(f"comm {i}")
        record = board.open(key, 8)
        assert record.q[16] == ALIVE
        offsets.append(record.offset)
        record.say_last_words(CLOSED, "closed")
        board.close(key, 8)
    assert len(set(offsets)) < 100
    assert offsets[-1] not in offsets[-60:-1]
    board.segment.close()


# ---------------------------------------------------------------------------------------------------------- wrong calls
def zeros(comm, *shape, dtype="float32"):
    return comm.device.zeros(shape, dtype)


WRONG = {
    "all_reduce: x must be a DeviceArray, got ndarray; copy it to the device first": lambda c: c.all_reduce(np.ones(3)),
    "all_reduce: x must be a DeviceArray, got list": lambda c: c.all_reduce([1.0], zeros(c, 1)),
    "all_reduce: x of shape (4, 2) is not contiguous": lambda c: c.all_reduce(zeros(c, 4, 4)[:, ::2]),
    "all_reduce: x is float32, out is int32": lambda c: c.all_reduce(zeros(c, 4), zeros(c, 4, dtype="int32")),
    "all_reduce: x of shape (4,) on 2 ranks needs 4 elements in out, got 5": lambda c: c.all_reduce(
        zeros(c, 4), zeros(c, 5)
    ),
    "op is one of 'sum', 'prod', 'max', 'min' or a ReduceOp, got 'xor'": lambda c: c.all_reduce(zeros(c, 4), op="xor"),
    "got 'avg'; HCCL has no average: sum and divide by the number of ranks": lambda c: c.all_reduce(
        zeros(c, 4), op="avg"
    ),
    "does not reduce float64; it reduces int8, int16": lambda c: c.all_reduce(zeros(c, 4, dtype="float64")),
    "has no prod of bfloat16": lambda c: c.all_reduce(zeros(c, 4, dtype="bfloat16"), op="prod"),
    "HCCL has no data type for bool": lambda c: c.broadcast(zeros(c, 4, dtype="bool"), 0),
    "broadcast: root is from 0 to 1, got 2": lambda c: c.broadcast(zeros(c, 4), 2),
    "reduce: root is a rank, got 'first'": lambda c: c.reduce(zeros(c, 4), "first"),
    "reduce: root is a rank, got True": lambda c: c.reduce(zeros(c, 4), True),
    "scatter needs x on its root": lambda c: c.scatter(None, c.rank),
    "needs out here, an array of one part": lambda c: c.scatter(None, 1 - c.rank),
    "reduce_scatter: the first axis of x must be divisible by 2 ranks, got shape (5, 2)": lambda c: c.reduce_scatter(
        zeros(c, 5, 2)
    ),
    "all_to_all: the first axis of x must be divisible by 2 ranks, got shape (3,)": lambda c: c.all_to_all(zeros(c, 3)),
    "all_to_all: x and out overlap": lambda c: (x := zeros(c, 4)) and c.all_to_all(x, x),
    "all_reduce: x and out overlap; in place means the same memory": lambda c: (
        (x := zeros(c, 6)) and c.all_reduce(x[:4], x[2:])
    ),
    "all_gather: x and out overlap": lambda c: (x := zeros(c, 4)) and c.all_gather(x[1:3], x),
    "all_gather: x of shape (2,) on 2 ranks needs 4 elements in out, got 3": lambda c: c.all_gather(
        zeros(c, 2), zeros(c, 3)
    ),
    "stream must be a Stream or None, got str": lambda c: c.all_reduce(zeros(c, 4), stream="fast"),
    "send: dest is from 0 to 1, got -1": lambda c: c.send(zeros(c, 4), -1),
    "recv: source is this rank itself; pair the two": lambda c: c.recv(zeros(c, 4), c.rank),
    "an item is ('send' or 'recv', array, peer), got ('give', 1, 2)": lambda c: c.batch_send_recv([("give", 1, 2)]),
    "1 sends to itself, but 0 receives from itself": lambda c: c.batch_send_recv([("send", zeros(c, 4), c.rank)]),
    "sub: a member is from 0 to 1, got 5": lambda c: c.sub([0, 5]),
    "sub: each rank is named once, got [1, 1]": lambda c: c.sub([1, 1]),
    "sub: a communicator needs at least one rank": lambda c: c.sub([]),
    "split: color is an int of 64 bits, got 'red'": lambda c: c.split("red"),
    "all_gather_v is not built yet": lambda c: c.all_gather_v(zeros(c, 4)),
    "reduce_scatter_v is not built yet": lambda c: c.reduce_scatter_v(zeros(c, 4)),
    "all_to_all_v is not built yet": lambda c: c.all_to_all_v(zeros(c, 4)),
    "from_rank_table is not built yet": lambda c: hccl.Communicator.from_rank_table("table.json", 0),
}


def test_a_wrong_call_says_what_is_wrong_and_does_no_harm():
    def work(comm):
        said = {}
        for text, call in WRONG.items():
            try:
                call(comm)
            except hccl.ArgumentError as error:
                said[text] = str(error) if error.code in (1, 5) else f"code {error.code}: {error}"
            else:
                said[text] = "nothing"
        total = comm.all_reduce(comm.device.array(np.ones(2, "float32"))).numpy().tolist()
        return said, total

    for rank, (said, total) in enumerate(run(work, 2)):
        assert {text: got for text, got in said.items() if text not in got} == {}
        assert f"rank {rank}: " in said["broadcast: root is from 0 to 1, got 2"]
        assert total == [2.0, 2.0]  # the communicator is still good


def test_arrays_of_other_devices_and_freed_arrays_are_refused():
    with Device(7, ordinal=7) as other:
        foreign, foreign_stream = other.zeros(4), other.stream()

        def work(comm):
            with pytest.raises(hccl.ArgumentError, match=f"x lies on device 7, but this rank's device is {comm.rank}"):
                comm.all_reduce(foreign)
            x = zeros(comm, 4)
            with pytest.raises(hccl.ArgumentError, match="is a stream of another device"):
                comm.all_reduce(x, stream=foreign_stream)
            comm.all_reduce(x).numpy()
            x.free()
            with pytest.raises(IllegalAddressError, match=r"all_reduce: use after free.*test_communicator"):
                comm.all_reduce(x)
            with pytest.raises(IllegalAddressError, match="use after free"):
                comm.send(x, 1 - comm.rank)

        run(work, 2)


# -------------------------------------------------------------------------------------------------------------- closing
def test_use_after_close_is_a_sentence_and_close_may_be_repeated():
    def work(comm):
        sub = comm.sub([0, 1], "pair")
        x = zeros(comm, 4)
        sub.all_reduce(x)
        sub.close()
        sub.close()
        assert sub.closed
        assert "closed" in repr(sub)
        calls = [
            lambda: sub.all_reduce(x),
            lambda: sub.all_reduce(zeros(comm, 3)),
            lambda: sub.barrier(),
            lambda: sub.send(x, 1 - comm.rank),
            lambda: sub.sub([0, 1]),
            lambda: sub.split(0),
        ]
        for call in calls:
            with pytest.raises(hccl.ClosedError, match=r"the communicator 'pair', which is closed here"):
                call()
        comm.all_reduce(x)
        return comm.closed

    assert run(work, 2) == [False, False]


def test_close_finishes_what_is_queued():
    kept = {}

    def work(comm):
        x = kept[comm.rank] = comm.device.array(np.ones(5, "float32"))
        sub = comm.sub([0, 1])
        for _ in range(3):
            sub.all_reduce(x)
        sub.close()
        assert comm.device.default_stream.query()
        return x.numpy()[0].item()

    assert run(work, 2, check="strict") == [8.0, 8.0]


def test_the_world_may_be_closed_before_its_subs():
    def work(comm):
        sub = comm.sub([1, 0])
        comm.close()
        value = sub.all_reduce(sub.device.array(np.array([1], "int32"))).numpy().item()
        sub.close()
        return value, sub.device.closed

    assert run(work, 2) == [(2, True)] * 2


def test_run_returns_in_rank_order_and_refuses_no_ranks():
    assert hccl.run(lambda comm: (comm.rank, comm.size, comm.name), 3) == [(r, 3, "hccl_world_group") for r in range(3)]
    with pytest.raises(hccl.ArgumentError, match="run needs a number of ranks, at least 1, got 0"):
        hccl.run(print, 0)


def test_init_all_makes_one_communicator_over_own_devices():
    comms = hccl.init_all([4, 2])
    assert [(c.rank, c.size, c.device.id) for c in comms] == [(0, 2, 4), (1, 2, 2)]
    arrays = [c.device.array(np.array([c.device.id], "int32")) for c in comms]
    for comm, x in zip(comms, arrays, strict=True):
        comm.all_reduce(x)  # queued: one thread may drive both
    assert [x.numpy().item() for x in arrays] == [6, 6]
    for comm in comms:
        comm.close()
    with pytest.raises(hccl.ArgumentError, match=r"a device is named once, got \[1, 1\]"):
        hccl.init_all([1, 1])
    with pytest.raises(hccl.ArgumentError, match="at least one device"):
        hccl.init_all([])


def test_explain_says_which_algorithm_and_why():
    def work(comm):
        return comm.explain("all_reduce", 1024), comm.explain("all_reduce", 1 << 20)

    small, large = run(work, 2)[0]
    assert small.startswith("all_reduce of 1024 bytes: one-shot Mesh, because")
    assert large.startswith("all_reduce of 1048576 bytes: Mesh, because")
