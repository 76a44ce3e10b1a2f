"""Topologies know who is in which server and what a transfer between two ranks costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hccl.errors import ArgumentError
from hccl.topology import PRESETS, preset, uniform


def test_uniform_links_are_all_alike():
    topology = uniform(3, 1e-6, 1e-9, 1e-10)
    assert (topology.ranks, topology.name, topology.gamma_s_per_byte) == (3, "uniform", 1e-10)
    assert topology.alpha([0, 1, 2], [1, 2, 0]).tolist() == [1e-6] * 3
    assert topology.beta(0, 2) == 1e-9
    assert topology.server_of.tolist() == [0, 0, 0]


def test_a_cluster_has_dear_links_between_its_servers():
    topology = preset("a2-cluster", servers="2x4")
    assert topology.server_of.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert topology.alpha([0, 3, 4], [3, 4, 7]).tolist() == [2e-6, 7e-6, 2e-6]
    assert (1 / topology.beta([0, 3], [3, 4])).tolist() == pytest.approx([18.6e9, 22.5e9])


def test_presets_are_sized_by_ranks_or_by_servers():
    assert preset("a2").ranks == 8
    assert preset("a2", ranks=3).server_of.tolist() == [0, 0, 0]
    assert preset("a2-cluster", servers=3).ranks == 24
    assert preset("a2-cluster", servers="3", cards=2).server_of.tolist() == [0, 0, 1, 1, 2, 2]
    assert preset("a2-cluster", ranks=12).server_of.tolist() == [0] * 8 + [1] * 4
    assert preset("a2-cluster", ranks=8, servers="2x4").ranks == 8
    assert preset("a3", servers=2).ranks == 32
    assert all(preset(name).lint() == [] for name in PRESETS)


def test_flows_through_one_interface_share_it():
    topology = preset("a3", ranks=16)
    port, flow = 1 / 196e9, 1 / 126e9
    alone = topology.transfer_s(np.array([0]), np.array([1]), np.array([1e6]))
    assert alone == pytest.approx([1.56e-6 + 1e6 * flow])
    three = topology.transfer_s(np.array([0, 0, 0]), np.array([1, 2, 3]), np.array([1e6, 1e6, 1e6]))
    assert three == pytest.approx([1.56e-6 + 3e6 * port] * 3)
    into_one = topology.transfer_s(np.array([1, 2, 3]), np.array([0, 0, 0]), np.array([1e6, 1e6, 1e6]))
    assert into_one == pytest.approx(three)
    both_ways = topology.transfer_s(np.array([0, 1]), np.array([1, 0]), np.array([1e6, 1e6]))
    assert both_ways == pytest.approx([float(alone[0])] * 2)  # full duplex


def test_near_and_far_flows_share_the_port_they_both_use():
    topology = preset("a3", ranks=17)  # rank 16 is in the second node
    times = topology.transfer_s(np.array([0, 0]), np.array([1, 16]), np.array([1e6, 1e6]))
    assert times == pytest.approx([1.56e-6 + 2e6 / 196e9, 3.05e-6 + 2e6 / 196e9])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "a9"}, "no topology preset 'a9': there are a2, a2-cluster, a3"),
        ({"name": "a2", "ranks": 9}, "'a2' has at most 8 ranks .*, not 9; use 'a2-cluster' for several servers"),
        ({"name": "a3", "servers": 49}, "'a3' has at most 768 ranks"),
        ({"name": "a2", "ranks": 0}, "at least 1 rank, got 0"),
        ({"name": "a2-cluster", "servers": "2x9"}, "a server of 'a2-cluster' has 8 cards, not 9"),
        ({"name": "a2-cluster", "servers": "two"}, "servers is a number or SERVERSxCARDS such as 2x4, got 'two'"),
        ({"name": "a2-cluster", "servers": "0x4"}, "at least 1 server and 1 card"),
        ({"name": "a2-cluster", "servers": "2x4", "cards": 8}, "servers='2x4' and cards=8 contradict each other"),
        ({"name": "a2-cluster", "servers": "2x4", "ranks": 9}, "2 servers of 4 cards have 8 ranks, not 9"),
    ],
)
def test_presets_refuse_sizes_that_the_product_does_not_have(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        preset(**arguments)


@pytest.mark.parametrize("constants", [(-1e-6, 0, 0), (0, -1, 0), (0, 0, float("nan")), (float("inf"), 0, 0)])
def test_uniform_refuses_constants_that_are_no_times(constants):
    with pytest.raises(ArgumentError, match="is 0 or more and finite"):
        uniform(2, *constants)
    with pytest.raises(ArgumentError, match="at least 1 rank"):
        uniform(0, 0, 0)


def test_lint_says_what_looks_like_a_mistake():
    topology = uniform(4, 1.0, 0.04)
    assert topology.lint() == [
        "uniform link: β = 0.04 s/byte is 25 bytes/s; is the unit seconds per byte?",
        "uniform link: α = 1 s; is the unit seconds?",
    ]
    assert preset("a2-cluster", ranks=12).lint() == ["servers have unequal numbers of ranks: [4, 8]"]
    apart = replace(uniform(4, 0, 0), server_of=np.array([0, 1, 0, 1]))
    assert apart.lint() == ["the ranks of a server are not numbered consecutively: neighbours in a ring are far apart"]
