"""Choose the number of chunks of every region, and the wires that are left to the planner.

A region that could have been switched has the planner's decision already: both are one choice.

Contract
    Requires  REGIONS_FOUND.
    Provides  PLANNED.
    Keeps     the graph.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from moe_compile.analysis.regions import Refused
from moe_compile.planning.plan import Remark, plan_num_chunks
from moe_compile.planning.plan_regions import decide_experts
from moe_compile.planning.state import CompileState
from passes.contract import Fact, GraphPass, PassReport, Verdict, verdict


class Left(enum.Enum):
    """Why a region gets no plan here."""

    GATHERED = "its tokens are gathered: in slices already, or whole"


@dataclass(frozen=True)
class PlanChunks(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "plan_chunks"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_FOUND})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.PLANNED})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Write `decision`, `num_chunks` and `remark` into every plan."""
        del graph
        regions = [plan.region for plan in state.plans if not plan.switch.is_switched]
        applied, skipped = [], []
        for plan in state.plans:
            if isinstance(plan.proof, Refused):
                skipped.append(verdict(plan.proof))
                continue
            if plan.switch.is_switched:  # planned where it was switched
                skipped.append(Verdict(candidate=plan.region.name, reason=Left.GATHERED))
                continue
            if plan.decision is None or plan.decision.gathers:  # the latter was not to be done
                plan.decision = decide_experts(plan, regions, state.config, state.hardware)
            plan.num_chunks, plan.remark = plan_num_chunks(state.config, plan.region, plan.decision)
            if plan.remark is None or plan.remark is Remark.BY_TOKENS:
                applied.append(plan.region.name)
            else:
                skipped.append(Verdict(candidate=plan.region.name, reason=plan.remark))
        return PassReport(pass_name=self.name, applied=tuple(applied), skipped=tuple(skipped))
