"""Decide how every region of a graph runs, of every kind, once.

Contract
    Requires  REGIONS_FOUND.
    Provides  PLANNED.
    Keeps     the graph. All decisions are taken on the graph as the model wrote it; the passes
              that follow carry them out and decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch.fx as fx

from moe_compile.cost.traced_nodes import Layers
from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from passes.bisected import regions_left_out
from passes.contract import Fact, GraphPass
from passes.fuse_token_sums import FuseTokenSums
from passes.kinds import KINDS
from passes.kinds.by_counts.products import products_in_eight_bits

REWRITES: Final = "rewrite_regions"
"""The pass that gives regions the form planned. Which nodes die once it has run is settled here: so
a region that it is left out of is known now."""


@dataclass(frozen=True)
class PlanRegions(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "plan_regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_FOUND})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.PLANNED})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Fill `state.planned`, `rewrite_regions` left out of regions as it is asked for."""
        regions = [region.name for region in state.found.regions]
        state.left_whole = regions_left_out(REWRITES, regions, state)
        layers = Layers(
            graph,
            state.found.regions,
            is_recomputed=state.is_recomputed,
            sums=FuseTokenSums().expected(graph, state),
            products=products_in_eight_bits(state),
        )
        state.planned = {kind.name: kind.plan(state, layers) for kind in KINDS}
        state.withdraw_from(state.left_whole, REWRITES)
        return PassReport(
            pass_name=self.name,
            applied=tuple(one.found.name for one in state.regions if one.is_rewritten),
            skipped=tuple(verdict for one in state.regions for verdict in one.left.values()),
        )
