"""Split every planned MoE region in chunks, by local expert or by tokens.

Contract
    Requires  REGIONS_FOUND, PLANNED.
    Provides  CHUNKED.
    Keeps     every value outside the regions bit for bit, every side effect, one count exchange
              and one bulk host read per region whatever the number of chunks, beside reads whose
              integers others need before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from moe_compile.analysis.regions import Refusal, Refused, RowProof
from moe_compile.analysis.rewrites import Aftermath, Rewrite, Surroundings
from moe_compile.analysis.surroundings import examine_surroundings
from moe_compile.graph.dependence import Dependence
from moe_compile.graph.edit import erase_dead, move_before, replace_uses
from moe_compile.planning.plan import Remark
from moe_compile.planning.state import CompileState, RegionPlan
from passes.contract import Fact, GraphPass, PassReport, Verdict, verdict
from passes.plan_chunks import Left
from passes.replay.gradient_paths import chunk_without_gradient
from passes.replay.masked_replay import emit_chunks, experts_of_chunks


@dataclass(frozen=True)
class ChunkRegions(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "chunk_regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_FOUND, Fact.PLANNED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.CHUNKED})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Replay each planned region; what nothing needs after all of them is erased."""
        planned: list[tuple[RegionPlan, RowProof]] = []
        skipped: list[Verdict] = []
        _check_gradients(graph, state)
        for plan in state.plans:
            if plan.switch.is_switched:
                skipped.append(Verdict(candidate=plan.region.name, reason=Left.GATHERED))
            elif isinstance(plan.proof, Refused):
                skipped.append(verdict(plan.proof))
            elif plan.num_chunks == 1:
                reason = plan.remark or Remark.ONE_CHUNK
                skipped.append(Verdict(candidate=plan.region.name, reason=reason))
            else:
                planned.append((plan, plan.proof))
        by_tokens = state.config.chunk_by == "tokens"
        after = examine_surroundings(
            [
                Rewrite(
                    region=plan.region,
                    proof=proof,
                    replaced=plan.region.result,
                    counts_first=True,
                    sliced=() if by_tokens else proof.sliceable,
                )
                for plan, proof in planned
            ]
        )
        chosen: list[_Chosen] = []
        for plan, proof in planned:
            around = after.around[plan.region.name]
            if isinstance(around, Refused):
                plan.proof = around
                skipped.append(verdict(around))
            else:
                chosen.append(_Chosen(plan, proof, around))
        _apply(graph, chosen, after, by_tokens=by_tokens)
        return PassReport(
            pass_name=self.name,
            applied=tuple(one.plan.region.name for one in chosen),
            skipped=tuple(skipped),
            measures={"num_bulk_host_reads": len(chosen)},
        )


def _check_gradients(graph: fx.Graph, state: CompileState) -> None:
    """Refuse regions of which a chunk would go without its exchanges in the backward pass."""
    by_tokens = state.config.chunk_by == "tokens"
    dependence = Dependence(graph)
    for plan in state.plans:
        region, proof = plan.region, plan.proof
        if isinstance(proof, Refused) or plan.switch.is_switched or plan.num_chunks == 1:
            continue
        bounds = experts_of_chunks(region, plan.num_chunks, by_tokens=by_tokens)
        chunk = chunk_without_gradient(region, proof, bounds, dependence)
        if chunk is not None:
            detail = f"chunk {chunk} of {plan.num_chunks}"
            plan.proof = Refused(
                candidate=region.name, reason=Refusal.NO_GRADIENT, detail=detail, is_region=True
            )


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A region to be replayed."""

    plan: RegionPlan
    proof: RowProof
    around: Surroundings


def _apply(graph: fx.Graph, chosen: list[_Chosen], after: Aftermath, *, by_tokens: bool) -> None:
    """Emit all regions first: until then each reads what it read, shared counts too."""
    dependence = Dependence(graph)
    emitted = []
    for one in chosen:
        what = (one.plan.region, one.proof, one.plan.num_chunks, one.around, dependence)
        emitted.append((one, emit_chunks(*what, by_tokens=by_tokens)))
    for one, new in emitted:
        plan, around = one.plan, one.around
        plan.dispatch.launches, plan.combine.launches = new.dispatches, new.combines
        plan.num_host_reads = 1 + around.num_kept
        replace_uses(around.sizes)
        replace_uses({**new.instead, plan.region.result: new.result})
        move_before(around.moved, around.read_at)
    erase_dead(after.dead)
