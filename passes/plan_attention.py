"""Decide in how many groups of heads attention runs, while experts are as the model wrote them.

Contract
    Requires  WAITS_VISIBLE.
    Keeps     the graph.
    Before any pass that rewrites experts: of what such a pass emits no sizes are known, and
    attention would be priced as if it were not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from moe_compile.analysis.detect_attention import find_attention
from moe_compile.planning.plan_regions import decide_attention
from moe_compile.planning.state import CompileState
from passes.contract import Fact, GraphPass, PassReport


@dataclass(frozen=True)
class PlanAttention(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "plan_attention"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.WAITS_VISIBLE})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Write the decision on each region that is left to the planner into the state."""
        state.attention_decisions = {}
        if state.config.attention_chunks == "auto":
            regions, _ = find_attention(graph)
            for region in regions:
                decision = decide_attention(region, regions, state.config, state.hardware)
                if decision is not None:
                    state.attention_decisions[region.name] = decision
        return PassReport(pass_name=self.name, applied=tuple(state.attention_decisions))
