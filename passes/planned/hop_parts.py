"""In how many parts rows go in two hops: chunks of experts, slices of tokens.

Contract
    A function of the options and of static facts of the region: the same on every rank.
    Parts change no bit. Chunks of experts are those of the flat exchange, and refused where these
    are; slices are of hop 1 alone, and experts wait for all of them.
"""

from __future__ import annotations

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.dependence import Dependence
from moe_compile.journal.reasons import Reason
from moe_compile.plan.chunk_numbers import plan_num_chunks
from moe_compile.plan.planned import FoundExperts
from moe_compile.regions.regions import Refused
from passes.planned.whole_experts import find_mixing
from passes.replay.gradient_paths import chunk_without_gradient
from passes.replay.masked_replay import experts_of_chunks


def plan_hop_slices(config: MegaMoEConfig) -> int:
    """Return the slices that hop 1 goes in beside chunks of experts.

    "auto" is one: parts in two hops have no price.
    """
    return 1 if config.hop_slices == "auto" else int(config.hop_slices)


def plan_hop_parts(
    experts: FoundExperts, config: MegaMoEConfig, dependence: Dependence
) -> tuple[int, Reason | None]:
    """Return the number of parts, and a reason when it is not what was asked.

    "auto" is one: parts in two hops have no price.
    """
    if config.chunks == "auto":
        return 1, Reason.TWO_HOPS
    region, proof = experts.region, experts.proof
    num_parts, reason = plan_num_chunks(config, region)
    if num_parts == 1 or config.chunk_by == "tokens" or isinstance(proof, Refused):
        return num_parts, reason
    bounds = experts_of_chunks(region, num_parts, by_tokens=False)
    if find_mixing(region, proof, bounds, by_tokens=False) is not None:
        return 1, Reason.ROWS_MIXED
    if chunk_without_gradient(region, proof, bounds, dependence) is not None:
        return 1, Reason.NO_GRADIENT
    return num_parts, reason
