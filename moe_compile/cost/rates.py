"""Rates that price work around one process group, each with how far it may be off.

Contract
    A function of the hardware profile and of the number of ranks: the same on every rank.
    The scheduler's estimate and the planner's prices both take their times from here.
    A group no larger than the profile's node is taken to lie within one; a larger one fills nodes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Final, Self

from moe_compile.hardware import HardwareProfile
from moe_compile.hardware.links import sent_us, spread_of
from moe_compile.hardware.products import Compute, Product
from moe_compile.hardware.profile import NO_HOST, RATES

US_PER_S: Final = 1e6
UNCERTAINTY: Final = {
    "measured": 0.10,
    "datasheet": 0.10,
    "fitted": 0.10,
    "literature": 0.20,
    "computed": 0.20,
    "assumed": 0.20,
}
"""Kind of a number's origin -> share by which it may be off. Assumed: a measured rate moves by
about a tenth between runs and devices of one kind."""
UNKNOWN: Final = 0.20
"""Share by which a rate of unstated origin, or one missing from a profile, may be off."""

GATHER_STEP: Final = 1.0 / 7.0
"""Share by which gathers within a node may be faster or slower against all-to-alls than stated.
That they win from 7 experts a token on among 8 ranks, and not with 6, is all the figure behind the
statement says (MegaScale-MoE, figure 7): a ratio of rates from 8/7 to 8/6."""


class Bound(enum.Enum):
    """The resource that bounds an operator's time. Values are printed in reports."""

    COMPUTE = "compute"
    MEMORY = "memory"
    LINK = "link"
    LAUNCH = "launch"
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates that divide amounts into times; units are the profile's."""

    matmul_tflops: float
    memory_gb_per_s: float
    op_overhead_us: float
    link_gb_per_s: float
    """All-to-all rate of the widest domain the group spans: the network, or a node's link."""
    link_latency_us: float
    gather_share: float = 1.0
    """Rate of an all-gather or a reduce-scatter over that of an all-to-all."""
    intra_node_gb_per_s: float = 0.0
    """Rate of a node's link, where the group spans several nodes; 0 where there is none."""
    intra_node_gather_share: float = 1.0
    """`gather_share` of a node's link."""
    contention: float = 0.0
    """Share by which compute slows while an exchange runs."""
    overlap_slowdown: float = 0.0
    """Share by which an exchange slows while compute runs."""
    intra_node_overlap_slowdown: float = 0.0
    """`overlap_slowdown` of a node's link."""
    compute: Compute | None = None
    """Rates of products by their shape; None where all have the rate `matmul_tflops`."""
    large_product_rate: float = 1.0
    """Rate of a product whose shape loses nothing, over `matmul_tflops`."""
    num_ranks: int = 0
    """Ranks of the group; 0 where the number is not known."""
    node_ranks: int = 1
    """Ranks that share a node's link, where the group spans several nodes."""
    uncertainty: tuple[tuple[str, float], ...] = ()
    """Rate -> share by which it may be off."""

    @classmethod
    def of(cls, hardware: HardwareProfile, num_ranks: int, node_ranks: int = 0) -> Self:
        """Return the rates of a group of `num_ranks`.

        `node_ranks` of them share a node, where that is known; 0 as the profile has it.
        """
        node = hardware.node
        if node is not None and node_ranks:
            node = replace(node, num_ranks=node_ranks)
        is_far = 0 < node_ranks < num_ranks
        link = hardware.link_of(0 if is_far else num_ranks)
        intra = node if node is not None and num_ranks > node.num_ranks else None
        origins = dict(hardware.origins)
        if link is node:
            origins |= {"link_gb_per_s": "assumed", "link_latency_us": "assumed"}
        if intra:
            origins |= {"intra_node_gb_per_s": "assumed"}
        shares = {name: share_off(origins.get(name, "")) for name in CONSTANTS}
        if link is node:
            shares["gather_share"] = GATHER_STEP
        if link.gather_share is None:  # one rate for all collectives: they are off together
            shares["gather_share"] = 0.0
        if intra is None or intra.gather_share is None:
            shares["intra_node_gather_share"] = 0.0
        return cls(
            matmul_tflops=hardware.matmul_tflops,
            memory_gb_per_s=hardware.memory_gb_per_s,
            op_overhead_us=hardware.op_overhead_us,
            link_gb_per_s=link.exchange_gb_per_s,
            link_latency_us=link.latency_us,
            gather_share=link.gather_over_exchange or 1.0,
            intra_node_gb_per_s=intra.exchange_gb_per_s if intra else 0.0,
            intra_node_gather_share=(intra.gather_over_exchange if intra else None) or 1.0,
            contention=link.contention,
            overlap_slowdown=link.overlap_slowdown,
            intra_node_overlap_slowdown=intra.overlap_slowdown if intra else 0.0,
            compute=hardware.compute,
            large_product_rate=hardware.large_product_rate if hardware.compute else 1.0,
            num_ranks=num_ranks,
            node_ranks=intra.num_ranks if intra else 1,
            uncertainty=tuple(shares.items()),
        )

    def compute_us(
        self,
        operations: float,
        nbytes: float,
        num_kernels: float,
        product: Product | None = None,
    ) -> float:
        """Return the time of one operator: the slower of arithmetic and memory, and launches.

        Where it is a `product`, its operations take as long as its shape says.
        """
        arithmetic, memory = self._parts_us(operations, nbytes, product)
        return num_kernels * self.op_overhead_us + max(arithmetic, memory)

    def memory_us(self, nbytes: float, kernels: float = 1.0) -> float:
        """Return the time to move `nbytes` in so many kernels."""
        return self.compute_us(0.0, nbytes, kernels)

    def compute_bound(
        self,
        operations: float,
        nbytes: float,
        num_kernels: float,
        product: Product | None = None,
    ) -> Bound:
        """Return which of the three takes the largest part of `compute_us`."""
        arithmetic, memory = self._parts_us(operations, nbytes, product)
        launches = num_kernels * self.op_overhead_us
        if not max(arithmetic, memory, launches):
            return Bound.NOTHING
        if launches > max(arithmetic, memory):
            return Bound.LAUNCH
        return Bound.COMPUTE if arithmetic >= memory else Bound.MEMORY

    def link_us(self, nbytes: float, *, is_gather: bool = False) -> float:
        """Return the time of one collective of so many bytes that leave a rank.

        Bytes within the node and bytes between nodes travel at once: the slower part counts.
        """
        rate = self.link_gb_per_s * (self.gather_share if is_gather else 1.0)
        if not self.intra_node_gb_per_s:
            return self.link_latency_us + sent_us(nbytes, rate)
        intra = self.intra_node_gb_per_s * (self.intra_node_gather_share if is_gather else 1.0)
        spread = spread_of(self.num_ranks, self.node_ranks, is_gather=is_gather)
        slower = max(sent_us(spread.between * nbytes, rate), sent_us(spread.within * nbytes, intra))
        return self.link_latency_us + slower

    def hop_us(self, nbytes: float, *, within: bool) -> float:
        """Return the time of one hop of so many bytes that leave a rank: all `within` its node, or
        all to other nodes. A profile of one link has it for both.
        """
        rate = self.intra_node_gb_per_s if within else 0.0
        return self.link_latency_us + sent_us(nbytes, rate or self.link_gb_per_s)

    def scores_us(self, nbytes: float) -> float:
        """Return the time of sending scores beside two hops: they go flat."""
        return self.link_us(nbytes)

    def _parts_us(
        self, operations: float, nbytes: float, product: Product | None
    ) -> tuple[float, float]:
        arithmetic = operations / (self.matmul_tflops * 1e12)
        if product is not None and self.compute is not None:
            arithmetic /= self.large_product_rate * self.compute.share_of(product)
        memory = nbytes / (self.memory_gb_per_s * 1e9)
        return arithmetic * US_PER_S, memory * US_PER_S

    def scaled(self, name: str, factor: float) -> Self:
        """Return the same rates with one constant `factor` times as large."""
        return replace(self, **{name: getattr(self, name) * factor})

    def perturbed(self) -> Iterator[Self]:
        """Return the rates with each constant perturbed up, then down, by its uncertainty."""
        for name, share in self.uncertainty:
            for factor in (1.0 + share, 1.0 - share):
                if share and getattr(self, name):
                    yield self.scaled(name, factor)


OF_NODE: Final = ("gb_per_s", "latency_us")
"""Names of the numbers of a node's link that may be off."""
FACTS: Final = frozenset(
    {"compute", "large_product_rate", "num_ranks", "node_ranks", "uncertainty"}
)
CONSTANTS: Final = tuple(f.name for f in fields(Rates) if f.name not in FACTS)
"""Names of the rates that may be off."""


def share_off(origin: str) -> float:
    """Return the share by which a number of this `origin` may be off."""
    kind = origin.partition(":")[0].split(" ")[0]
    return UNCERTAINTY.get(kind, UNKNOWN)


def perturbed_profiles(hardware: HardwareProfile) -> Iterator[HardwareProfile]:
    """Yield `hardware` with each constant above zero up, then down, by how far it may be off.

    All host costs are off together: another processor, another Python.
    """
    for name in RATES:
        for factor in _factors(hardware.origins.get(name, "")):
            if value := getattr(hardware, name):
                yield replace(hardware, **{name: value * factor})
    if hardware.host != NO_HOST:
        for factor in _factors("assumed"):
            yield replace(hardware, host=hardware.host.scaled(factor))
    yield from _with_other_nodes(hardware)


def _with_other_nodes(hardware: HardwareProfile) -> Iterator[HardwareProfile]:
    if (node := hardware.node) is None:
        return
    for name in OF_NODE:
        for factor in _factors("assumed"):
            if value := getattr(node, name):
                yield replace(hardware, node=replace(node, **{name: value * factor}))


def _factors(origin: str) -> tuple[float, float]:
    """Return the factors, above and below 1, by which a number of this origin may be off."""
    share = share_off(origin)
    return 1.0 + share, 1.0 - share
