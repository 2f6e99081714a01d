"""Move tokens by all-gather and reduce-scatter instead of rows by all-to-all, where asked.

Contract
    Requires  REGIONS_FOUND.
    Keeps     the rows, their order and the counts that the experts see; every value bit for bit
              where a token's sum has at most two addends, else each sum to one rounding of the
              wire's type per addend and rank; gradients of a weighted sum's weights, which are sums
              over the width, to one of their type per column.
    Decides   with the planner, for every region that could be switched, chunks and wires too:
              `dispatch = "auto"` switches where that is its decision, and where it has none by
              the rule of bytes and only where no bit changes.
    Loses     the exchange of counts, and with `dispatch_padding = "worst"` every host read and
              every size known only at run time, of bodies that have none of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch.fx as fx

from moe_compile.analysis.body_needs import needs_of_body
from moe_compile.analysis.regions import MoERegion, Refused, RowProof
from moe_compile.analysis.rewrites import Aftermath, Rewrite
from moe_compile.analysis.surroundings import examine_surroundings
from moe_compile.analysis.token_regions import NotFound, TokenRows, Unswitched
from moe_compile.analysis.token_rows import find_token_rows
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.edit import erase_dead, move_before, replace_uses
from moe_compile.graph.query import known_rows, waits_on
from moe_compile.planning.dispatch_rules import dispatch_costs, quantises_rows, rounding_of
from moe_compile.planning.gathered_sizes import GatheredWay
from moe_compile.planning.plan import plan_token_slices
from moe_compile.planning.plan_regions import asks_planner, decide_experts
from moe_compile.planning.state import CompileState, RegionPlan, SwitchVerdict
from passes.contract import Fact, GraphPass, PassReport, Verdict
from passes.replay.gathered import Gathered, emit_gathered
from passes.replay.gathered_slice import Switch


@dataclass(frozen=True)
class SwitchDispatch(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "switch_dispatch"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_FOUND})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Rewrite the regions that the options ask for and that allow it."""
        del graph  # the plans name its nodes
        chosen: list[tuple[RegionPlan, Switch, Aftermath]] = []
        skipped: list[Verdict] = []
        regions = [plan.region for plan in state.plans]
        for plan in state.plans:
            decided = _decide(plan, regions, state)
            if isinstance(decided, NotFound):
                skipped.append(
                    Verdict(
                        candidate=plan.region.name, reason=decided.reason, detail=decided.detail
                    )
                )
            else:
                chosen.append((plan, *decided))
        emitted = [  # last first: one may gather the sums of another
            (plan, switch, _rewrite(plan.region, switch, after))
            for plan, switch, after in reversed(chosen)
        ]
        state.gathered_groups.update(plan.region.group for plan, _, _ in emitted)
        for plan, switch, gathered in emitted:
            _note(plan, switch, gathered)
        return PassReport(
            pass_name=self.name,
            applied=tuple(plan.region.name for plan, _, _ in chosen),
            skipped=tuple(skipped),
        )


def _decide(
    plan: RegionPlan, regions: Iterable[MoERegion], state: CompileState
) -> tuple[Switch, Aftermath] | NotFound:
    """Return how to switch a region, or why not; the plan keeps verdict and decision."""
    config, found = state.config, find_token_rows(plan.region)
    if isinstance(found, TokenRows):
        plan.switch.costs = dispatch_costs(plan.region, found)
    decided = _could(plan, regions, config, found)
    if not isinstance(decided, NotFound):
        switch, after = decided
        way = _way(plan, switch)
        plan.decision = decide_experts(plan, regions, config, state.hardware, way)
        refused = _against(plan, config, switch.found)
        decided = NotFound(reason=refused) if refused else (_sliced(plan, config, switch), after)
    elif config.dispatch == "all_to_all":
        decided = NotFound(reason=Unswitched.NOT_ASKED)
    if isinstance(decided, NotFound):
        plan.switch.reason, plan.switch.detail = decided.reason, decided.detail
    return decided


def _could(
    plan: RegionPlan,
    regions: Iterable[MoERegion],
    config: MegaMoEConfig,
    found: TokenRows | NotFound,
) -> tuple[Switch, Aftermath] | NotFound:
    """Return how the region would be switched, whole, or why it cannot be."""
    if config.dispatch == "all_to_all" and not asks_planner(config, can_gather=True):
        return NotFound(reason=Unswitched.NOT_ASKED)
    if isinstance(plan.proof, Refused):
        return NotFound(reason=Unswitched.NOT_PROVEN, detail=plan.proof.reason.value)
    if isinstance(found, NotFound):
        return found
    if found.mean_rows_per_token is None:
        return NotFound(reason=Unswitched.ROWS_MAY_DIFFER)
    if not config.equal_tokens:
        return NotFound(reason=Unswitched.TOKENS_MAY_DIFFER)
    after = examine_surroundings([_region_rewrite(plan.region, plan.proof, regions, found)])
    around = after.around[plan.region.name]
    if isinstance(around, Refused):
        return NotFound(reason=Unswitched.NOT_PROVEN, detail=around.reason.value)
    needs = needs_of_body(plan.region)
    if needs.reads_sent:
        return NotFound(reason=Unswitched.SENT_SIZES)
    reads_anyway = needs.reads_host or bool(around.served) or around.num_kept > 0
    switch = Switch(
        region=plan.region,
        found=found,
        needs=needs,
        num_slices=1,
        is_exact=reads_anyway or config.dispatch_padding == "exact",
    )
    return switch, after


def _region_rewrite(
    region: MoERegion, proof: RowProof, regions: Iterable[MoERegion], found: TokenRows
) -> Rewrite:
    """Say what a switch takes the place of: from the gather of the rows to their sums.

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


def _way(plan: RegionPlan, switch: Switch) -> GatheredWay | None:
    costs = plan.switch.costs
    if costs is None:
        return None
    room = 1.0 if switch.is_exact else costs.padding
    return GatheredWay(region=plan.region, found=switch.found, room=room)


def _against(plan: RegionPlan, config: MegaMoEConfig, found: TokenRows) -> Unswitched | None:
    """Return what speaks against switching a region that could be switched."""
    if config.dispatch != "auto":
        return None if config.dispatch == "all_gather" else Unswitched.NOT_ASKED
    if quantises_rows(config):
        return Unswitched.QUANTISED
    rounding, costs = rounding_of(found), plan.switch.costs
    if plan.decision is not None:
        if rounding.bound_eps is None:
            return Unswitched.UNBOUNDED
        return None if plan.decision.gathers else Unswitched.BY_PRICE
    if not rounding.is_bitwise:
        return Unswitched.LOSSY
    return None if costs is not None and costs.by_measurement else Unswitched.NOT_WORTHWHILE


def _sliced(plan: RegionPlan, config: MegaMoEConfig, switch: Switch) -> Switch:
    slices, plan.remark = plan_token_slices(config, switch.found, plan.decision)
    plan.num_chunks = slices
    return replace(switch, num_slices=slices)


def _rewrite(region: MoERegion, switch: Switch, after: Aftermath) -> Gathered:
    around = after.around[region.name]
    assert not isinstance(around, Refused)
    emitted = emit_gathered(switch, around)
    replace_uses(around.sizes)
    replace_uses({**emitted.instead, switch.found.sums.total: emitted.result})
    move_before(around.moved, around.read_at)
    erase_dead(after.dead)
    return replace(emitted, num_kept_reads=around.num_kept)


def _note(plan: RegionPlan, switch: Switch, emitted: Gathered) -> None:
    """Write into the plan what its region became; only where all edits succeeded."""
    plan.dispatch.launches, plan.combine.launches = emitted.gathers, emitted.reduces
    plan.num_host_reads = int(switch.is_exact) + emitted.num_kept_reads
    plan.switch = SwitchVerdict(
        is_switched=True,
        is_exact=switch.is_exact,
        num_tokens=known_rows(switch.found.tokens),
        rows_per_token=switch.found.mean_rows_per_token or 0,
        rounding=rounding_of(switch.found),
        costs=plan.switch.costs,
    )
