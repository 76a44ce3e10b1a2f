"""The virtual time of an executed operation is what `simulate` says of its schedule, whenever the ranks come in."""

from __future__ import annotations

import numpy as np
import pytest

import hccl
from device.kernels import scale
from hccl.algorithms import build
from hccl.schedule import Schedule, Step
from hccl.simulate import simulate
from hccl.topology import preset, uniform

LIMIT_S = 120  # of a run that hangs

TOPOLOGIES = {
    "uniform": lambda ranks: uniform(ranks, 1.5e-6, 3e-11, 7e-12),
    "a2": lambda ranks: preset("a2", ranks=ranks),
    "a2-cluster": lambda ranks: preset("a2-cluster", servers=f"2x{ranks // 2}" if ranks % 2 == 0 else f"{ranks}x1"),
}
OPERATIONS = {  # the last rank is the root
    "all_reduce": lambda c, d, n, kind: c.all_reduce(d.zeros(n, kind)),
    "all_gather": lambda c, d, n, kind: c.all_gather(d.zeros(n, kind)),
    "reduce_scatter": lambda c, d, n, kind: c.reduce_scatter(d.zeros(n * c.size, kind)),
    "broadcast": lambda c, d, n, kind: c.broadcast(d.zeros(n, kind), c.size - 1),
    "reduce": lambda c, d, n, kind: c.reduce(d.zeros(n, kind), c.size - 1, out=d.empty(n, kind)),
    "scatter": lambda c, d, n, kind: c.scatter(d.zeros(n * c.size, kind), c.size - 1, d.empty(n, kind)),
    "all_to_all": lambda c, d, n, kind: c.all_to_all(d.zeros(n * c.size, kind)),
}
UNSPLIT = ("all_reduce", "broadcast", "reduce")
SHAPES = [(0, "float32"), (1, "int8"), (3, "bfloat16"), (4096, "float16"), (100_003, "float32"), (5000, "int64")]


def enter_times(ranks, turn):
    """Give unequal times, in another order of the ranks for each turn; some are far apart, some nearly together."""
    return np.random.default_rng([ranks, turn]).permutation(ranks) * 10.0 ** -(3 + turn % 5) + 1e-3 * turn


def chosen(op, algo, ranks, nbytes):
    """Build the schedule that the documented choice takes: one shot up to 16 KiB unless an algorithm is asked for."""
    options = {"root": ranks - 1} if op in ("broadcast", "reduce", "scatter") else {}
    if algo == "auto" and op == "all_reduce" and nbytes <= 16384:
        options["one_shot"] = True
    return build(op, "ring" if algo == "ring" and op != "all_to_all" else "mesh", ranks, **options)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("algo", ["auto", "ring"])
def test_every_collective_takes_the_time_of_its_schedule(algo, ranks, name):
    calls = [(op, *shape) for i, op in enumerate(OPERATIONS) for shape in SHAPES[(i + ranks) % 2 :: 2]]

    def work(comm):
        stream = comm.device.default_stream
        times = []
        for turn, (op, count, kind) in enumerate(calls):
            stream.now_s = enter_times(ranks, turn)[comm.rank]
            OPERATIONS[op](comm, comm.device, count, kind)
            stream.synchronize()
            times.append(stream.now_s)
        return times

    network = TOPOLOGIES[name](ranks)
    executed = np.array(hccl.run(work, ranks, topology=network, config=hccl.Config(algo=algo), timeout_s=LIMIT_S)).T
    for turn, ((op, count, kind), got) in enumerate(zip(calls, executed, strict=True)):
        size = {"int8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}[kind]
        nbytes = count * size * (1 if op in UNSPLIT else ranks)
        expected = simulate(chosen(op, algo, ranks, nbytes), network, nbytes, enter_times(ranks, turn))
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=0, err_msg=f"{op} of {count} {kind}")


def test_work_and_copies_before_a_call_are_its_time_of_entry():
    def work(comm):
        d, stream = comm.device, comm.device.default_stream
        x = d.array(np.ones(50_000, "float32"))
        for _ in range(comm.rank):
            d.launch(scale, x, 2.0, out=x)
        d.charge_copy(1000 * comm.rank, True)
        stream.synchronize()
        before, waited = stream.now_s, stream.wait_s
        comm.all_reduce(x)
        stream.synchronize()
        return before, stream.now_s, stream.wait_s - waited, stream.comm_s

    network = preset("a2", ranks=4)
    enter, leave, waited, communicated = np.array(hccl.run(work, 4, topology=network, timeout_s=LIMIT_S)).T
    assert (np.diff(enter) > 0).all()
    np.testing.assert_allclose(leave, simulate(build("all_reduce", "mesh", 4), network, 200_000, enter), rtol=1e-12)
    np.testing.assert_allclose(waited, enter.max() - enter, rtol=1e-12)  # for the last to come in
    np.testing.assert_allclose(communicated, leave - enter.max(), rtol=1e-9)


def test_an_event_carries_the_time_of_a_collective_to_another_stream():
    def work(comm):
        d = comm.device
        one, two = d.stream(), d.stream()
        comm.all_reduce(d.zeros(70_000), stream=one)
        two.wait(one.record())
        two.synchronize()
        return one.now_s, two.now_s

    for one, two in hccl.run(work, 3, timeout_s=LIMIT_S):
        assert one == two > 0


def test_a_barrier_takes_the_time_of_an_all_reduce_of_8_float32():
    def work(comm):
        stream = comm.device.default_stream
        stream.now_s = enter_times(3, 1)[comm.rank]
        comm.barrier()
        stream.synchronize()
        return stream.now_s

    network = preset("a2", ranks=3)
    expected = simulate(build("all_reduce", "mesh", 3, one_shot=True), network, 32, enter_times(3, 1))
    np.testing.assert_allclose(hccl.run(work, 3, topology=network, timeout_s=LIMIT_S), expected, rtol=1e-12)


@pytest.mark.parametrize("count", [0, 1, 70_001])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_message_takes_the_time_of_a_schedule_of_one_row(name, count):
    network = TOPOLOGIES[name](4)
    rows = Schedule("broadcast", "one row", 4, 1, 1, 1, 0, lambda: [Step.of(3, 0, 0, 1)])
    enter = enter_times(4, 2)

    def work(comm):
        stream = comm.device.default_stream
        x = comm.device.zeros(count)
        stream.synchronize()
        stream.now_s = enter[comm.rank]
        if comm.rank == 3:
            comm.send(x, 0)
        elif comm.rank == 0:
            comm.recv(x, 3)
        stream.synchronize()
        return stream.now_s

    executed = hccl.run(work, 4, topology=network, timeout_s=LIMIT_S)
    np.testing.assert_allclose(executed, simulate(rows, network, 4 * count, enter), rtol=1e-12, atol=0)


def test_ring_of_batches_takes_one_step_of_a_ring():
    network = uniform(3, 1e-6, 1e-9)
    enter = enter_times(3, 0)

    def work(comm):
        d, me = comm.device, comm.rank
        x, y = d.zeros(1000, "int8"), d.empty(1000, "int8")
        d.default_stream.now_s = enter[me]
        comm.batch_send_recv([("send", x, (me + 1) % 3), ("recv", y, (me - 1) % 3)])
        d.default_stream.synchronize()
        return d.default_stream.now_s

    rows = Schedule("broadcast", "rows", 3, 1, 1, 1, 0, lambda: [Step.of([0, 1, 2], [1, 2, 0], 0, 1)])
    np.testing.assert_allclose(
        hccl.run(work, 3, topology=network, timeout_s=LIMIT_S), simulate(rows, network, 1000, enter), rtol=1e-12
    )


def test_a_sub_communicator_sees_its_part_of_the_network():
    """Ranks 1 and 2 are on different servers, 2 and 3 on one."""
    network = preset("a2-cluster", servers="2x2")

    def work(comm):
        times = []
        for ranks in ([1, 2], [2, 3]):
            sub = comm.sub(ranks)
            if sub is not None:
                stream = comm.device.stream()
                sub.all_reduce(comm.device.zeros(50_000), stream=stream)
                stream.synchronize()
                times.append(stream.now_s)
                sub.close()
        return times

    schedule = build("all_reduce", "mesh", 2)
    across = simulate(schedule, network.subset([1, 2]), 200_000)
    within = simulate(schedule, network.subset([2, 3]), 200_000)
    found = hccl.run(work, 4, topology=network, timeout_s=LIMIT_S)
    assert across[0] > within[0]
    np.testing.assert_allclose(found[2], [across[1], within[0]], rtol=1e-12)
    np.testing.assert_allclose(found[3], [within[1]], rtol=1e-12)


def test_a_network_of_another_size_is_refused():
    with pytest.raises(hccl.ArgumentError, match="the topology 'uniform' has 3 ranks, the communicator 2"):
        hccl.run(print, 2, topology=uniform(3, 0, 0))
