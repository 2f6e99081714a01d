"""Decide how every region of a graph runs: experts and attention together, once.

Contract
    Requires  REGIONS_FOUND.
    Provides  PLANNED.
    Keeps     the graph. All decisions are taken on the graph as the model wrote it; the passes
              that follow carry them out and decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from moe_compile.cost.layers import Layers
from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass
from passes.fuse_token_sums import FuseTokenSums
from passes.planned.attention import plan_attention
from passes.planned.capacity import plan_capacity
from passes.planned.experts import plan_experts


@dataclass(frozen=True)
class PlanRegions(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "plan_regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_FOUND})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.PLANNED})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Fill `state.experts`, `state.capacity` and `state.attention`."""
        layers = Layers(
            graph,
            state.found.regions,
            is_recomputed=state.is_recomputed,
            sums=FuseTokenSums().expected(graph, state),
        )
        state.experts, state.dead = plan_experts(graph, state, layers)
        state.attention = plan_attention(state, layers)
        state.capacity = plan_capacity(state, layers)
        state.launches = {
            one.found.region.name: {
                "dispatch": (one.found.region.dispatch,),
                "combine": (one.found.region.combine,),
            }
            for one in state.experts
        }
        state.results = {one.found.region.name: one.found.region.result for one in state.experts}
        return PassReport(
            pass_name=self.name,
            applied=tuple(one.found.region.name for one in state.regions if one.is_rewritten),
            skipped=tuple(verdict for one in state.regions for verdict in one.left.values()),
        )
