"""Split every planned MoE region in chunks, by local expert or by tokens.

Contract
    Requires  REGIONS_FOUND, PLANNED.
    Provides  CHUNKED.
    Keeps     every value outside the regions bit for bit, every side effect, one count exchange
              and one bulk host read per region whatever the number of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from moe_compile.analysis.regions import Refused, RowProof
from moe_compile.analysis.surroundings import Surroundings, examine_surroundings
from moe_compile.graph.edit import erase_unused
from moe_compile.planning.plan import Remark
from moe_compile.planning.state import CompileState, RegionPlan
from passes.contract import Fact, GraphPass, PassReport, Verdict, verdict
from passes.plan_chunks import Left
from passes.replay.masked_replay import emit_chunks


@dataclass(frozen=True)
class ChunkRegions(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "chunk_regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_FOUND, Fact.PLANNED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.CHUNKED})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Replay each planned region; regions of one graph are independent of one another."""
        del graph  # the plans name its nodes
        decided: list[tuple[RegionPlan, RowProof, Surroundings]] = []
        skipped: list[Verdict] = []
        for plan in state.plans:
            if plan.switch.is_switched:
                skipped.append(Verdict(candidate=plan.region.name, reason=Left.GATHERED))
            elif isinstance(plan.proof, Refused):
                skipped.append(verdict(plan.proof))
            elif plan.num_chunks == 1:
                reason = plan.remark or Remark.ONE_CHUNK
                skipped.append(Verdict(candidate=plan.region.name, reason=reason))
            elif isinstance(around := examine_surroundings(plan.region), Refused):
                plan.proof = around
                skipped.append(verdict(around))
            else:
                decided.append((plan, plan.proof, around))
        for plan, proof, around in decided:
            _apply(plan, proof, around, by_tokens=state.config.chunk_by == "tokens")
        return PassReport(
            pass_name=self.name,
            applied=tuple(plan.region.name for plan, _, _ in decided),
            skipped=tuple(skipped),
            measures={"num_bulk_host_reads": len(decided)},
        )


def _apply(plan: RegionPlan, proof: RowProof, around: Surroundings, *, by_tokens: bool) -> None:
    region = plan.region
    for node in reversed(around.stale_assertions):
        node.graph.erase_node(node)
    chunked = emit_chunks(region, proof, plan.num_chunks, around.kept_reads, by_tokens=by_tokens)
    plan.dispatch.launches, plan.combine.launches = chunked.dispatches, chunked.combines
    for node, value in chunked.instead.items():
        node.replace_all_uses_with(value)
    for node in around.readers_of_kept:
        region.result.prepend(node)
    erase_unused([node for node in region.body if node is not region.result])
