"""How far `dispatch = "auto"` is from the better dispatch on eight ranks of a node: predicted.

Contract
    The best is found by trying all-to-all in every number of equal chunks, and gathered tokens: by
    the planner's own prices, and by those of `megamoe simulate`, which has other formulas for each
    kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.planner.chunk_choice import divisors
from benchmarks.planner.dispatch_layers import GATHERED, GatherableLayer
from benchmarks.planner.planned_models import SHAPES, capture_layer, fake_group
from benchmarks.planner.simulated_layer import TOKENS, simulated_us
from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork
from moe_compile.hardware import load_profile
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.region_tasks import price_us
from moe_compile.simulator.models import ModelShape

RANKS: Final = 8
TOP_K: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedLayer:
    """One model's layer on eight ranks of a node."""

    shape: ModelShape
    layer: GatherableLayer
    work: RegionWork

    def ways(self, chunks: int | str) -> list[Candidate]:
        """Return every way that changes no more than the order of a token's sum."""
        nums = divisors(self.work.num_parts) if chunks == "auto" else [1]
        return [*(Candidate(num_chunks=num) for num in nums), GATHERED]

    def own_us(self, way: Candidate, profile: str) -> float:
        """Return the planner's price."""
        return price_us(self.work, way, Rates.of(load_profile(profile), RANKS))

    def simulated_us(self, way: Candidate, profile: str) -> float:
        """Return the time of the layer by `megamoe simulate`."""
        gathers = way.dispatch == "all_gather"
        ways = {"gathers_rows": gathers, "sums_gathered": True}
        return simulated_us(self.shape, profile, RANKS, way.num_chunks, **ways)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedChoice:
    """What was chosen on one profile, and the time of every way there is."""

    layer: SimulatedLayer
    profile: str
    decision: Decision
    own_us: dict[Candidate, float]
    simulated_us: dict[Candidate, float]

    def regret(self, times: dict[Candidate, float]) -> float:
        """Return by which share the chosen way is slower than the fastest."""
        return times[self.decision.chosen.candidate] / min(times.values()) - 1.0

    def dispatch_regret(self, times: dict[Candidate, float]) -> float:
        """Return by which share the chosen dispatch, at its best, is slower than the other."""
        chosen = self.decision.chosen.candidate.dispatch
        return best_of(times, chosen) / min(times.values()) - 1.0


def best_of(times: dict[Candidate, float], dispatch: str) -> float:
    """Return the least time of the ways with that dispatch."""
    return min(us for way, us in times.items() if way.dispatch == dispatch)


def simulated_layers(top_k: int = TOP_K) -> Iterator[SimulatedLayer]:
    """Return every model's layer with so many experts a token."""
    group = fake_group(RANKS)
    for model in SHAPES:
        shape = replace(model, top_k=top_k)
        layer = GatherableLayer.of(capture_layer(shape, group, TOKENS))
        yield SimulatedLayer(shape=shape, layer=layer, work=layer.work())


def choose(layer: SimulatedLayer, profile: str, chunks: int | str = "auto") -> SimulatedChoice:
    """Return the choice for `layer` on a profile; `chunks` is "auto", or 1 for whole regions."""
    ways = layer.ways(chunks)
    return SimulatedChoice(
        layer=layer,
        profile=profile,
        decision=layer.layer.decide(load_profile(profile), chunks=chunks),
        own_us={way: layer.own_us(way, profile) for way in ways},
        simulated_us={way: layer.simulated_us(way, profile) for way in ways},
    )
