"""A layer whose tokens could be gathered, and what the planner decides for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.read_regions import work_of_experts
from moe_compile.cost.region_work import RegionWork
from moe_compile.hardware import HardwareProfile, load_profile
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.decide import Gathering, decide_experts
from moe_compile.plan.dispatch_rules import rounding_of
from moe_compile.plan.planned import FoundExperts
from moe_compile.plan.state import CompileState
from moe_compile.regions.regions import RowProof
from moe_compile.regions.token_regions import GatheredForm
from moe_compile.regions.token_rows import find_token_rows
from passes.detect_regions import DetectRegions
from passes.kinds.by_counts.gathering import gathered_form, gathered_work

GATHERED: Final = Candidate(dispatch="all_gather")
ASKED: Final = MegaMoEConfig(
    dispatch="auto", numerics="bounded", chunk_by="experts", equal_tokens=True
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherableLayer:
    """The one region of a graph."""

    found: FoundExperts
    gathering: Gathering

    @classmethod
    def of(cls, graph: fx.Graph, **options: Any) -> GatherableLayer:
        """Find the region of `graph`; `options` as the compilation has them."""
        config = replace(ASKED, **options)
        state = CompileState(config=config, hardware=load_profile("cpu"))
        DetectRegions().run(graph, state)
        (found,) = state.found.experts
        rows = find_token_rows(found.region)
        form = gathered_form(found, [found.region], config, rows)
        assert isinstance(form, GatheredForm), form
        assert isinstance(found.proof, RowProof)
        work = gathered_work(form, found.proof, [found.region])
        return cls(found=found, gathering=Gathering(work=work, rounding=rounding_of(form.found)))

    def decide(self, hardware: HardwareProfile, **options: Any) -> Decision:
        """Return the decision under `dispatch = "auto"` and other `options`."""
        config = replace(ASKED, **options)
        decision = decide_experts(self.found, config, hardware, gathering=self.gathering)
        assert decision is not None
        return decision

    def work(self) -> RegionWork:
        """Return the work of either dispatch."""
        assert isinstance(self.found.proof, RowProof)
        work = work_of_experts(self.found.region, self.found.proof, load_profile("cpu"))
        assert work is not None
        return replace(
            work,
            gathered=self.gathering.work,
            gather_is_bitwise=self.gathering.rounding.is_bitwise,
        )
