"""A layer whose tokens could be gathered, and what the planner decides for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch.fx as fx

from moe_compile.analysis.regions import Refused
from moe_compile.analysis.token_regions import TokenRows
from moe_compile.analysis.token_rows import find_token_rows
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import HardwareProfile, load_profile
from moe_compile.planning.candidates import Candidate
from moe_compile.planning.choose_plan import Decision
from moe_compile.planning.decide import decide_experts
from moe_compile.planning.gathered_sizes import GatheredWay
from moe_compile.planning.planned import FoundExperts
from moe_compile.planning.read_regions import work_of_experts
from moe_compile.planning.region_work import RegionWork
from moe_compile.planning.state import CompileState
from passes.detect_regions import DetectRegions

GATHERED: Final = Candidate(dispatch="all_gather")


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherableLayer:
    """The one region of a graph."""

    found: FoundExperts
    way: GatheredWay

    @classmethod
    def of(cls, graph: fx.Graph) -> GatherableLayer:
        """Find the region of `graph`."""
        state = CompileState(config=MegaMoEConfig(), hardware=load_profile("cpu"))
        DetectRegions().run(graph, state)
        (found,) = state.found.experts
        rows = find_token_rows(found.region)
        assert isinstance(rows, TokenRows), rows
        return cls(found=found, way=GatheredWay(region=found.region, found=rows))

    def decide(self, hardware: HardwareProfile, **options: Any) -> Decision:
        """Return the decision under `dispatch = "auto"` and other `options`."""
        config = MegaMoEConfig(dispatch="auto", numerics="bounded", equal_tokens=True, **options)
        decision = decide_experts(self.found, [], config, hardware, self.way)
        assert decision is not None
        return decision

    def work(self) -> RegionWork:
        """Return the work of either dispatch."""
        assert not isinstance(self.found.proof, Refused)
        work = work_of_experts(self.found.region, self.found.proof, [], self.way)
        assert work is not None
        return work
