"""What the planner says of a layer before it runs: time per number of chunks, and its choice."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import torch

from benchmarks.planner.planned_models import capture
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.rates import Rates
from moe_compile.cost.read_regions import work_of_experts
from moe_compile.cost.region_work import RegionWork
from moe_compile.hardware import HardwareProfile, load_profile
from moe_compile.journal.reasons import Left
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.decide import decide_experts
from moe_compile.plan.planned import FoundExperts
from moe_compile.plan.region_tasks import price_us
from moe_compile.plan.state import CompileState
from passes.detect_regions import DetectRegions
from passes.normalize_exchanges import NormalizeExchanges
from passes.pipeline import Level, run_level

FOUND: Final = Level((NormalizeExchanges(), DetectRegions()))
"""What comes before a plan."""
STEP_PEAK_BYTES: Final = 2**30
"""Stated to passes and planner, as the torchtitan recipe does: the layer is one of a model's many.
Of the layer alone `max_memory_increase` may allow too little to put off weight gradients."""
PLANNED: Final = MegaMoEConfig(equal_tokens=True, strict=True, step_peak_bytes=STEP_PEAK_BYTES)
"""Everything left to the planner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedLayer:
    """The one region of a layer, and its work."""

    found: FoundExperts
    work: RegionWork

    def rated(self, hardware: HardwareProfile, ratio: float) -> HardwareProfile:
        """Return `hardware` with a link on which the bytes of a step take compute / `ratio`.

        Compute is that of one chunk, predicted; routing is even.
        """
        infinite = replace(hardware, link_gb_per_s=math.inf, link_latency_us=0.0)
        even = replace(self, work=replace(self.work, imbalance=1.0))
        sent = sum(w.link_bytes for phase in self.work.phases for w in phase)
        return replace(hardware, link_gb_per_s=sent / 1e3 * ratio / even.us(1, infinite))

    def us(self, num_chunks: int, hardware: HardwareProfile) -> float:
        """Return the predicted time of a step in so many chunks of experts."""
        rates = Rates.of(hardware, self.work.num_ranks)
        return price_us(self.work, Candidate(num_chunks=num_chunks), rates)

    def decide(self, hardware: HardwareProfile) -> Decision:
        """Return the planner's decision."""
        decision = decide_experts(self.found, PLANNED, hardware)
        assert decision is not None
        return decision


def predict_layer(
    module: torch.nn.Module, tokens: torch.Tensor, imbalance: float = 1.0
) -> PredictedLayer:
    """Capture `module` and read it as the planner does; it must have one region.

    Prices, not the decision, count with the `imbalance` stated: the planner knows of none.
    """
    state = CompileState(config=PLANNED, hardware=load_profile(PLANNED.hardware))
    run_level(FOUND, capture(module, tokens), state)
    (found,) = state.found.experts
    assert not isinstance(found.proof, Left), found.proof
    work = work_of_experts(found.region, found.proof, state.hardware)
    assert work is not None
    return PredictedLayer(found=found, work=replace(work, imbalance=imbalance))
