"""Times of a region in one chunk, flat and in two hops: for reports.

Contract
    Predicted for the profile, forward and backward of all the work around the region. Where sizes
    are not static there is no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moe_compile.cost.hop_shape import HopShape
from moe_compile.cost.rates import Rates
from moe_compile.cost.read_regions import work_of_experts
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.hardware import HardwareProfile
from moe_compile.journal.reasons import Left
from moe_compile.plan.candidates import HOPS, Candidate
from moe_compile.plan.region_tasks import price_us
from moe_compile.regions.regions import MoERegion, RowProof


@dataclass(frozen=True, kw_only=True, slots=True)
class HopPrices:
    """Times and bytes of one region."""

    shape: HopShape
    us: Mapping[str, float]
    """Value of the option -> time; empty where nothing is priced."""


def price_hops(
    region: MoERegion,
    proof: RowProof | Left,
    shape: HopShape,
    hardware: HardwareProfile,
    layer: TracedNodes,
) -> HopPrices:
    """Return the times of the region in its `layer`, flat and in two hops."""
    work = None if isinstance(proof, Left) else work_of_experts(region, proof, hardware, layer)
    if work is None:
        return HopPrices(shape=shape, us={})
    rates = Rates.of(hardware, work.num_ranks, shape.num_local)
    work = replace(work, hops=shape)
    ways = ("off", *HOPS)
    return HopPrices(
        shape=shape, us={nodes: price_us(work, Candidate(nodes=nodes), rates) for nodes in ways}
    )
