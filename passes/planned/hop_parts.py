"""In how many parts rows go in two hops: chunks of experts, slices of tokens.

Contract
    A function of the options and of static facts of the region: the same on every rank.
    Parts change no bit. Chunks of experts are those of the flat exchange, and refused where these
    are; slices are of hop 1 alone, and experts wait for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.dependence import Dependence
from moe_compile.journal.reasons import Reason
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.chunk_numbers import plan_num_chunks
from moe_compile.plan.planned import FoundExperts
from moe_compile.regions.regions import Refused
from moe_compile.regions.token_regions import NotFound
from passes.planned.whole_experts import find_mixing
from passes.replay.gradient_paths import chunk_without_gradient
from passes.replay.masked_replay import experts_of_chunks


class HopParts(NamedTuple):
    """The parts of one region."""

    num_chunks: int
    """Chunks of experts, or slices of tokens where `chunk_by` says so."""
    num_slices: int
    """Slices of tokens that hop 1 goes in beside chunks of experts."""
    why: NotFound | None
    """Why chunks are not as asked."""


def plan_hop_parts(
    experts: FoundExperts, config: MegaMoEConfig, dependence: Dependence, decision: Decision | None
) -> HopParts:
    """Return the parts; "auto" is what the planner decided for two hops, else one."""
    chosen = None if decision is None else decision.chosen.candidate
    if chosen is not None and chosen.nodes == "off":
        chosen = None
    num_slices = 1 if chosen is None else chosen.hop_slices
    if config.hop_slices != "auto":
        num_slices = int(config.hop_slices)
    if config.chunks == "auto" and (chosen is None or config.chunk_by == "tokens"):
        return HopParts(1, num_slices, NotFound(reason=Reason.TWO_HOPS))
    region, proof = experts.region, experts.proof
    num_chunks, why = plan_num_chunks(config, region, decision)
    if num_chunks == 1 or config.chunk_by == "tokens" or isinstance(proof, Refused):
        return HopParts(num_chunks, num_slices, why)
    bounds = experts_of_chunks(region, num_chunks, by_tokens=False)
    if find_mixing(region, proof, bounds, by_tokens=False) is not None:
        return HopParts(1, num_slices, NotFound(reason=Reason.ROWS_MIXED))
    if chunk_without_gradient(region, proof, bounds, dependence) is not None:
        return HopParts(1, num_slices, NotFound(reason=Reason.NO_GRADIENT))
    return HopParts(num_chunks, num_slices, why)
