"""What the network looks like: which server a rank is in, and what a transfer between two ranks costs.

The model is HCCL's own: a transfer takes α + bytes·β seconds, a reduction γ seconds per byte. On top of that,
transfers of one step that go over the same wire or through the same network interface share it: each takes as long as
the whole load of its busiest resource. Links are full duplex. Copies within a rank are free, as in HCCL's model (in
place there are none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hccl.errors import ArgumentError
from hccl.schedule import IntArray

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Link:
    """A kind of connection between two ranks.

    alpha_s: latency. beta_s_per_byte: seconds per byte of one transfer that has the connection for itself.
    nic: name of the interface of a rank that all its connections with this `nic` go through; "" = a wire of its own for
    every pair of ranks. nic_beta_s_per_byte: what the interface as a whole needs per byte, in each direction.
    """

    name: str
    alpha_s: float
    beta_s_per_byte: float
    nic: str = ""
    nic_beta_s_per_byte: float = 0.0


@dataclass(frozen=True, eq=False)
class Topology:
    """Ranks in servers, a kind of link inside a server and one between servers.

    server_of: (ranks,) server number of each rank. gamma_s_per_byte: seconds to reduce one byte.
    """

    name: str
    server_of: IntArray
    inside: Link
    between: Link
    gamma_s_per_byte: float

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.server_of)

    def subset(self, ranks: Sequence[int]) -> Topology:
        """Give the part of this network that these ranks, in this order, see."""
        return replace(self, server_of=self.server_of[np.asarray(ranks, dtype=np.int64)])

    def _pick(self, src: ArrayLike, dst: ArrayLike, inside: float, between: float) -> Seconds:
        return np.where(self.server_of[np.asarray(src)] == self.server_of[np.asarray(dst)], inside, between)

    def alpha(self, src: ArrayLike, dst: ArrayLike) -> Seconds:
        """Latency from each rank of `src` to the corresponding one of `dst`, in seconds."""
        return self._pick(src, dst, self.inside.alpha_s, self.between.alpha_s)

    def beta(self, src: ArrayLike, dst: ArrayLike) -> Seconds:
        """Seconds per byte of a transfer that has its link for itself."""
        return self._pick(src, dst, self.inside.beta_s_per_byte, self.between.beta_s_per_byte)

    def transfer_s(self, src: IntArray, dst: IntArray, nbytes: Seconds) -> Seconds:
        """Seconds that each of these simultaneous transfers between different ranks takes, shared links included."""
        _, wire, rows = np.unique(src * self.ranks + dst, return_inverse=True, return_counts=True)
        on_wire = nbytes if bool((rows == 1).all()) else np.bincount(wire, nbytes)[wire]
        load_s = on_wire * self.beta(src, dst)
        same_server = self.server_of[src] == self.server_of[dst]
        for nic in {self.inside.nic, self.between.nic} - {""}:
            through = np.zeros(len(src), dtype=bool)
            for link, uses in ((self.inside, same_server), (self.between, ~same_server)):
                through |= uses if link.nic == nic else False
            a, b, size = src[through], dst[through], nbytes[through]
            busiest = np.maximum(np.bincount(a, size, self.ranks)[a], np.bincount(b, size, self.ranks)[b])
            nic_beta = self._pick(a, b, self.inside.nic_beta_s_per_byte, self.between.nic_beta_s_per_byte)
            load_s[through] = np.maximum(load_s[through], busiest * nic_beta)
        return self.alpha(src, dst) + load_s

    def lint(self) -> list[str]:
        """Say what about this topology is likely a mistake, one sentence each; an empty list if nothing is."""
        found = []
        _, first, cards = np.unique(self.server_of, return_index=True, return_counts=True)
        if len(set(cards.tolist())) > 1:
            found.append(f"servers have unequal numbers of ranks: {sorted(set(cards.tolist()))}")
        if np.count_nonzero(np.diff(self.server_of)) != len(first) - 1:
            found.append("the ranks of a server are not numbered consecutively: neighbours in a ring are far apart")
        for link in dict.fromkeys((self.inside, self.between)):
            if link.beta_s_per_byte > 0 and not 1e6 <= 1 / link.beta_s_per_byte <= 1e13:
                found.append(
                    f"{link.name} link: β = {link.beta_s_per_byte:g} s/byte is {1 / link.beta_s_per_byte:.3g} bytes/s; "
                    "is the unit seconds per byte?"
                )
            if link.alpha_s > 0.1:
                found.append(f"{link.name} link: α = {link.alpha_s:g} s; is the unit seconds?")
        return found


def uniform(ranks: int, alpha_s: float, beta_s_per_byte: float, gamma_s_per_byte: float = 0.0) -> Topology:
    """Give the network of HCCL's cost table: one server, a wire of its own between any two ranks, all alike.

    Raises: ArgumentError for no rank or a negative constant.

    >>> uniform(4, 1e-6, 1e-9).alpha(0, 3)
    array(1.e-06)
    """
    if ranks < 1:
        raise ArgumentError(f"a topology needs at least 1 rank, got {ranks}")
    constants = {"alpha_s": alpha_s, "beta_s_per_byte": beta_s_per_byte, "gamma_s_per_byte": gamma_s_per_byte}
    for name, value in constants.items():
        if not 0 <= value < np.inf:
            raise ArgumentError(f"{name} is 0 or more and finite, got {value!r}")
    link = Link("uniform", alpha_s, beta_s_per_byte)
    return Topology("uniform", np.zeros(ranks, dtype=np.int64), link, link, gamma_s_per_byte)


# HCCS of the A2, one link per pair of the 8 cards of a server. Chosen: 18.6 GB/s and 2 µs, the fit to measured 910B
# all_gather and all_reduce bus rates at 2, 4 and 8 cards (limulidae README: all_gather 38/64/149, all_reduce 18/30/72
# GB/s). It agrees with measured point-to-point writes of 19.1-19.4 GB/s (HIXL benchmarks/A2_benchmark_performance.md;
# reads reach 25.8) and with the 18.3 effective and 19.3 nominal GB/s in HCCL's source. The data sheet says 56 GB/s per
# link, both ways.
_HCCS_A2 = Link("HCCS", alpha_s=2e-6, beta_s_per_byte=1 / 18.6e9)

# RoCE of the A2, one 200 Gbit/s interface per card. Rate: measured 22.5-22.6 GB/s within and between nodes (HIXL, as
# above). Latency: 7 µs, the RDMA constant of HCCL's task_profiling.h (models of others say 1.5 to 5.5).
_ROCE_A2 = Link("RoCE", alpha_s=7e-6, beta_s_per_byte=1 / 22.5e9, nic="RoCE", nic_beta_s_per_byte=1 / 22.5e9)

# HCCS of an A3 super node through its switches, per die. One flow: 126 GB/s, 1.56 µs in a node and 125.5 GB/s, 3.05 µs
# across nodes: fits with residuals < 0.5 % to measured writes (HIXL benchmarks/A3_benchmark_performance.md). All flows
# of a die together: 196 GB/s one way (msmodeling; half of the 392 GB/s per package of the CloudMatrix384 paper, arXiv
# 2506.12708).
_HCCS_A3 = Link("HCCS", 1.56e-6, 1 / 126e9, nic="HCCS port", nic_beta_s_per_byte=1 / 196e9)
_HCCS_A3_FAR = Link("HCCS across nodes", 3.05e-6, 1 / 125.5e9, nic="HCCS port", nic_beta_s_per_byte=1 / 196e9)

# Reduction: none on top of the transfer. SDMA reduces while it moves the data, and the all_reduce rates above are met
# within 3 % at 2 and 8 cards without any γ, while the only reduce rates known (10 GB/s, CCE of the 910A,
# task_profiling.h; 483 GB/s, cost model of the 950) would put the 8-card rate 80 % and 9 % too low.
_INLINE_REDUCE = 0.0


@dataclass(frozen=True)
class _Product:
    """Limits of a product: cards (NPUs that are ranks) per server, servers that can be connected this way."""

    cards: int
    max_servers: int
    inside: Link
    between: Link


_PRODUCTS = {
    # Atlas 800T A2: 8 cards, full mesh of HCCS.
    "a2": _Product(8, 1, _HCCS_A2, _ROCE_A2),
    # The same servers over RoCE; HCCL's limit of 32768 ranks in a communicator bounds the number of servers.
    "a2-cluster": _Product(8, 4096, _HCCS_A2, _ROCE_A2),
    # Atlas 900 A3 SuperPoD: 16 dies per server, 48 servers of 8 packages = the 384 packages of a super node.
    "a3": _Product(16, 48, _HCCS_A3, _HCCS_A3_FAR),
}

PRESETS = tuple(_PRODUCTS)


def _shape(name: str, product: _Product, servers: int | str, cards: int | None) -> tuple[int, int]:
    """Read `servers` ("2x4", "2" or 2) and `cards` as (number of servers, cards in each)."""
    count, _, per_server = str(servers).lower().partition("x")
    try:
        number = int(count)
        given = int(per_server) if per_server else cards
    except ValueError:
        raise ArgumentError(f"servers is a number or SERVERSxCARDS such as 2x4, got {servers!r}") from None
    if per_server and cards is not None and cards != given:
        raise ArgumentError(f"servers={servers!r} and cards={cards} contradict each other")
    given = product.cards if given is None else given
    if number < 1 or given < 1:
        raise ArgumentError(f"a topology needs at least 1 server and 1 card, got {servers!r} with {given} cards")
    if given > product.cards:
        raise ArgumentError(f"a server of {name!r} has {product.cards} cards, not {given}")
    return number, given


def preset(name: str, ranks: int | None = None, servers: int | str | None = None, cards: int | None = None) -> Topology:
    """Give the network of a product, with measured constants (sources beside the numbers in this file).

    name: "a2" (one Atlas 800T A2 server, full mesh of HCCS), "a2-cluster" (such servers over RoCE), "a3" (A3 super
    node). Give `ranks`, which fill servers one after the other, or `servers`: a number, or SERVERSxCARDS as "2x4".
    `cards`: cards used per server (default: all). With neither, one full server.
    Raises: ArgumentError for an unknown name or a size that the product does not have.

    >>> preset("a2-cluster", servers="2x4").server_of
    array([0, 0, 0, 0, 1, 1, 1, 1])
    """
    if name not in _PRODUCTS:
        raise ArgumentError(f"no topology preset {name!r}: there are {', '.join(PRESETS)}")
    product = _PRODUCTS[name]
    if ranks is None and servers is None:
        servers = 1
    if servers is not None:
        number, per_server = _shape(name, product, servers, cards)
        total = number * per_server
        if ranks is not None and ranks != total:
            raise ArgumentError(f"{number} servers of {per_server} cards have {total} ranks, not {ranks}")
    else:
        assert ranks is not None
        total = ranks
        if total < 1:
            raise ArgumentError(f"a topology needs at least 1 rank, got {total}")
        _, per_server = _shape(name, product, 1, cards)
        number = -(-total // per_server)
    if number > product.max_servers:
        most = product.max_servers * per_server
        hint = "; use 'a2-cluster' for several servers" if name == "a2" else ""
        raise ArgumentError(f"{name!r} has at most {most} ranks ({per_server} cards per server), not {total}{hint}")
    server_of = np.arange(total, dtype=np.int64) // per_server
    return Topology(name, server_of, product.inside, product.between, _INLINE_REDUCE)
