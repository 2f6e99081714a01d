"""`python -m benchmarks.planner`: how far the planner's choices are from the best ones.

Contract
    Every time is predicted. The best is found by trying every number of chunks, in the planner's
    own simulator and in that of `megamoe simulate`, which has other formulas for each kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.planned_models import SHAPES, capture_layer, fake_group
from moe_compile.analysis.detect_moe import find_moe_regions
from moe_compile.analysis.regions import Refused
from moe_compile.analysis.row_proof import prove_rows_independent
from moe_compile.hardware import load_profile
from moe_compile.hardware.cluster import load_cluster
from moe_compile.planning.candidates import Candidate, list_candidates
from moe_compile.planning.choose_plan import Decision, choose_plan
from moe_compile.planning.cluster.layer_costs import LayerCosts
from moe_compile.planning.cluster.layer_time import time_layer
from moe_compile.planning.cluster.method import Attention, Method, Overlap
from moe_compile.planning.cluster.models import ModelShape
from moe_compile.planning.rates import CONSTANTS, Rates
from moe_compile.planning.read_regions import work_of_experts
from moe_compile.planning.region_tasks import price_us
from moe_compile.planning.region_work import RegionWork

PROFILES: Final = ("h100", "h800", "h200")
RANKS: Final = (8, 64)
TOKENS: Final = 4096
"""Per rank."""
WRONG: Final = (1.2, 0.8)
"""Factors on a constant that is wrong by 20 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLayer:
    """One model's layer on so many ranks."""

    shape: ModelShape
    num_ranks: int
    work: RegionWork

    def decide(self, rates: Rates, *, lossy: bool = False) -> Decision:
        """Return the planner's decision; of fp8 wires too where `lossy`."""
        ways = list_candidates(self.work, ("experts",))
        return choose_plan(self.work, rates, ways, lambda way: lossy or not way.is_lossy(self.work))

    def regret(self, chosen: Candidate, rates: Rates, *, lossy: bool = False) -> float:
        """Return by which share `chosen` is slower than the best way there is."""
        wires = ("same", "fp8") if lossy else ("same",)
        best = min(
            price_us(self.work, way, rates)
            for num in divisors(self.work.num_parts)
            for way in (
                Candidate(num_chunks=num, dispatch_wire=a, combine_wire=b)
                for a in wires
                for b in wires
            )
        )
        return price_us(self.work, chosen, rates) / best - 1.0

    def cluster_us(self, profile: str, num_chunks: int) -> float:
        """Return the time that `megamoe simulate` has for the layer in so many chunks."""
        overlap = Overlap.CHUNKS if num_chunks > 1 else Overlap.INTER_OP
        method = Method(
            attention=Attention.WHOLE,
            ranks=1,
            expert_ranks=self.num_ranks,
            overlap=overlap,
            num_chunks=num_chunks,
            sends_flat=True,
        )
        cluster = load_cluster(profile)
        costs = LayerCosts(
            model=self.shape,
            method=method,
            profile=cluster,
            fit=cluster.fit("none"),
            seq_len=TOKENS,
            tokens=TOKENS,
        )
        return time_layer(costs).total_us

    def cluster_regret(self, profile: str, num_chunks: int) -> float:
        """Return the regret of `num_chunks` by `megamoe simulate`."""
        best = min(self.cluster_us(profile, n) for n in divisors(self.work.num_parts))
        return self.cluster_us(profile, num_chunks) / best - 1.0


def divisors(number: int) -> list[int]:
    """Return all divisors: every number of equal chunks there is."""
    return [n for n in range(1, number + 1) if number % n == 0]


def layers() -> Iterator[PlannedLayer]:
    """Return every model on every number of ranks that its experts can be shared by evenly."""
    groups = {num: fake_group(num) for num in RANKS}
    for shape in SHAPES:
        for num_ranks in RANKS:
            if shape.num_experts % num_ranks == 0:
                graph = capture_layer(shape, groups[num_ranks], TOKENS)
                (region,), _ = find_moe_regions(graph)
                proof = prove_rows_independent(region)
                assert not isinstance(proof, Refused), proof
                work = work_of_experts(region, proof)
                assert work is not None
                yield PlannedLayer(shape=shape, num_ranks=num_ranks, work=work)


def wrong_rates(rates: Rates) -> Iterator[tuple[str, Rates]]:
    """Return the rates with each constant 20 % too high, then too low; 0 stands for none."""
    for name in (name for name in CONSTANTS if getattr(rates, name)):
        for factor in WRONG:
            yield f"{name} x {factor:g}", rates.scaled(name, factor)


def worst_regret(layer: PlannedLayer, rates: Rates, *, lossy: bool = False) -> tuple[float, str]:
    """Return the largest regret of what is chosen with one constant wrong, and which."""
    found = []
    for name, wrong in wrong_rates(rates):
        chosen = layer.decide(wrong, lossy=lossy).chosen.candidate
        found.append((layer.regret(chosen, rates, lossy=lossy), name))
    return max(found)


def _row(layer: PlannedLayer, profile: str) -> list[str]:
    rates = Rates.of(load_profile(profile), layer.num_ranks)
    decision = layer.decide(rates)
    chosen = decision.chosen.candidate
    figures = (
        layer.regret(chosen, rates),
        layer.cluster_regret(profile, chosen.num_chunks),
        worst_regret(layer, rates)[0],
        worst_regret(layer, rates, lossy=True)[0],
    )
    names = [layer.shape.name, str(layer.num_ranks), profile, str(chosen.num_chunks)]
    return [*names, f"{decision.gain:.1%}", *(f"{figure:.1%}" for figure in figures)]


def main() -> int:
    """Print one row per model, ranks and profile."""
    table = Table(title="Predicted: the planner's choice, and its regret")
    for heading in (
        "model", "EP", "profile", "N", "gain", "regret", "by simulate",
        "N, 20 % wrong", "wires, 20 % wrong",
    ):  # fmt: skip
        table.add_column(heading)
    for layer in layers():
        for profile in PROFILES:
            table.add_row(*_row(layer, profile))
    Console(width=130).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
