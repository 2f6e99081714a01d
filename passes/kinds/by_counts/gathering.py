"""Whether and how the tokens of a MoE region can be gathered instead of its rows exchanged.

Contract
    The graph is as the model wrote it, and is not edited.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import operator_at, waits_on
from moe_compile.journal.left import Left
from moe_compile.journal.reasons import Reason
from moe_compile.journal.remedies import allowed_by
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.decide import asks_planner
from moe_compile.plan.dispatch_rules import DispatchCosts, quantises_rows, rounding_of
from moe_compile.plan.planned import FoundExperts
from moe_compile.regions.body_needs import needs_of_body
from moe_compile.regions.regions import MoERegion, Refused, RowProof
from moe_compile.regions.rewrites import Rewrite
from moe_compile.regions.surroundings import examine_surroundings
from moe_compile.regions.token_regions import GatheredForm, TokenRows

EIGHT_BITS: Final = "eight bits are asked for, in which an all-gather sends nothing"
NOT_COUNTED: Final = "; how many rows a token has is not proven"
NO_TIMES: Final = "auto has no times to go by: megamoe.dispatch = 'all_gather' gathers all the same"
FEW_ROWS: Final = "k is at most 0.75 n: an all-to-all moves less"


def gathered_form(
    experts: FoundExperts,
    regions: Iterable[MoERegion],
    config: MegaMoEConfig,
    found: TokenRows | Left,
) -> GatheredForm | Left:
    """Return how the tokens of a region would be gathered, whole, or why they cannot be."""
    if isinstance(experts.proof, Refused):
        return Left(Reason.NOT_PROVEN, experts.proof.reason.value)
    if (unfit := why_mixed(experts.proof) or why_rounded(experts.proof)) is not None:
        return unfit
    if isinstance(found, Left):
        return found
    if found.mean_rows_per_token is None:
        return Left(Reason.ROWS_MAY_DIFFER)
    if not config.equal_tokens:
        return Left(Reason.TOKENS_MAY_DIFFER)
    after = examine_surroundings([gathering(experts.region, experts.proof, regions, found)])
    around = after.around[experts.region.name]
    if isinstance(around, Refused):
        return Left(Reason.NOT_PROVEN, around.reason.value)
    needs = needs_of_body(experts.region)
    if needs.reads_sent:
        return Left(Reason.SENT_SIZES)
    return GatheredForm(region=experts.region, found=found, needs=needs, num_slices=1)


def why_mixed(proof: RowProof) -> Left | None:
    """Return what may need all rows of an expert at once, None where nothing does."""
    for node, _ in proof.whole:
        return Left(Reason.NOT_PROVEN, f"{operator_at(node)} may mix rows of an expert")
    return None


def why_rounded(proof: RowProof) -> Left | None:
    """Return why no other form than chunks is known to keep to a bound, None where one is."""
    for reason, nodes in (
        (Reason.SHARED_PARAMETER, proof.shared),
        (Reason.UNSTABLE_SORT, proof.reordered),
    ):
        if nodes:
            return Left(reason, ", ".join(map(operator_at, nodes)))
    return None


def may_be_priced(config: MegaMoEConfig, costs: DispatchCosts | None) -> bool:
    """Whether gathering may be chosen, or be advice: then the rule of bytes must speak for it."""
    if config.dispatch != "all_to_all":
        return True
    is_asked = asks_planner(config, can_gather=True)
    return is_asked and costs is not None and costs.by_measurement


def gathering(
    region: MoERegion, proof: RowProof, regions: Iterable[MoERegion], found: TokenRows
) -> Rewrite:
    """Say what gathered tokens take the place of: from the gather of the rows to their sums.

    Host reads that another region has too stay where they are: it may be rewritten as well.
    """
    elsewhere = (other for other in regions if other is not region)
    return Rewrite(
        region=region,
        proof=proof,
        replaced=found.sums.total,
        before=(*found.before,),
        behind=(region.result, *found.after, *found.sums.tail),
        others=(found.gather, region.count_exchange, *waits_on(region.count_exchange)),
        read_once=tuple((factor, found.readers(factor)) for factor in found.factors),
        reads_late=True,
        not_served=frozenset(node for other in elsewhere for node in other.count_side),
    )


def against(
    form: GatheredForm,
    decision: Decision | None,
    costs: DispatchCosts | None,
    config: MegaMoEConfig,
) -> Left | None:
    """Return what speaks against gathering tokens that could be gathered."""
    if config.dispatch != "auto":
        return None if config.dispatch == "all_gather" else Left(Reason.NOT_ASKED)
    if quantises_rows(config):
        return Left(Reason.NOT_ASKED, EIGHT_BITS)
    rounding = rounding_of(form.found)
    if decision is not None:
        if not config.allows(rounding.numerics):
            of_sums = NOT_COUNTED if rounding.numerics == "lossy" else ""
            detail = allowed_by(rounding.numerics) + of_sums
            return Left(Reason.ROUNDS, detail)
        return None if decision.gathers else Left(Reason.BY_PRICE)
    if not rounding.is_bitwise:
        return Left(Reason.ROUNDS, NO_TIMES)
    if costs is not None and costs.by_measurement:
        return None
    return Left(Reason.NO_FEWER_BYTES, FEW_ROWS)
