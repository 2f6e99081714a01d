"""`python -m benchmarks.planner.chunk_choice`: how far the chosen chunks are from the best.

Contract
    Every time is predicted. The best is found by trying every number of chunks, in the planner's
    own simulator and in that of `megamoe simulate`, which has other formulas for each kernel and
    another order of tasks. Both have what the compiled graph has: between nodes a plain
    all-to-all, each row over the network once per expert it goes to; the order of rows by chunk
    found by kernels of its own, slices of weight gradients joined.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.planner.planned_models import SHAPES, capture_layer, fake_group
from benchmarks.planner.simulated_layer import TOKENS, simulated_us
from moe_compile.cost.rates import CONSTANTS, Rates
from moe_compile.cost.read_regions import work_of_experts
from moe_compile.cost.region_work import RegionWork
from moe_compile.graph.facts import GraphFacts
from moe_compile.hardware import load_profile
from moe_compile.journal.reasons import Left
from moe_compile.plan.candidates import Candidate, list_candidates
from moe_compile.plan.choose_plan import Decision, choose_plan
from moe_compile.plan.region_tasks import price_us
from moe_compile.proof.row_proof import prove_rows_independent
from moe_compile.regions.detect_moe import find_moe_regions
from moe_compile.simulator.models import ModelShape

PROFILES: Final = ("h100", "h800", "h200")
RANKS: Final = (8, 64)
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

    def best_us(self, rates: Rates, *, lossy: bool = False) -> float:
        """Return the time of the best way there is, in any number of equal chunks."""
        wires = ("same", "fp8") if lossy else ("same",)
        return min(
            price_us(self.work, Candidate(num_chunks=n, dispatch_wire=a, combine_wire=b), rates)
            for n, a, b in itertools.product(divisors(self.work.num_parts), wires, wires)
        )

    def regret(self, chosen: Candidate, rates: Rates) -> float:
        """Return by which share `chosen` is slower than the best number of chunks."""
        return price_us(self.work, chosen, rates) / self.best_us(rates) - 1.0

    def cluster_us(self, profile: str, num_chunks: int) -> float:
        """Return the time that `megamoe simulate` has for the layer in so many chunks."""
        return simulated_us(self.shape, profile, self.num_ranks, num_chunks)

    def cluster_regret(self, profile: str, num_chunks: int) -> float:
        """Return the regret of `num_chunks` by `megamoe simulate`."""
        best = min(self.cluster_us(profile, n) for n in divisors(self.work.num_parts))
        return self.cluster_us(profile, num_chunks) / best - 1.0


def divisors(number: int) -> list[int]:
    """Return all divisors: every number of equal chunks there is."""
    return [n for n in range(1, number + 1) if number % n == 0]


def cells() -> list[tuple[ModelShape, int]]:
    """Return every model on every number of ranks that its experts can be shared by evenly."""
    pairs = itertools.product(SHAPES, RANKS)
    return [(shape, ranks) for shape, ranks in pairs if shape.num_experts % ranks == 0]


def layers(wanted: Sequence[tuple[ModelShape, int]] | None = None) -> Iterator[PlannedLayer]:
    """Return the layers of models on numbers of ranks; of all `cells` unless told which."""
    wanted = cells() if wanted is None else wanted
    groups = {num: fake_group(num) for num in {num for _, num in wanted}}
    for shape, num_ranks in wanted:
        graph = capture_layer(shape, groups[num_ranks], TOKENS)
        (region,), _ = find_moe_regions(GraphFacts(graph))
        proof = prove_rows_independent(region)
        assert not isinstance(proof, Left), proof
        work = work_of_experts(region, proof, load_profile("h100"))
        assert work is not None
        yield PlannedLayer(shape=shape, num_ranks=num_ranks, work=work)


def wrong_rates(rates: Rates) -> Iterator[tuple[str, Rates]]:
    """Return the rates with each constant 20 % too high, then too low; 0 stands for none."""
    for name in (name for name in CONSTANTS if getattr(rates, name)):
        for factor in WRONG:
            yield f"{name} x {factor:g}", rates.scaled(name, factor)


def worst_regret(layer: PlannedLayer, rates: Rates, *, lossy: bool = False) -> tuple[float, str]:
    """Return the largest regret of what is chosen with one constant wrong, and which."""
    best, found = layer.best_us(rates, lossy=lossy), []
    for name, wrong in wrong_rates(rates):
        chosen = layer.decide(wrong, lossy=lossy).chosen.candidate
        found.append((price_us(layer.work, chosen, rates) / best - 1.0, name))
    return max(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One layer planned for one profile, and how far that is from the best; shares of a time."""

    layer: PlannedLayer
    profile: str
    decision: Decision
    own: float
    """By the planner's own prices."""
    simulate: float
    """By those of `megamoe simulate`."""
    wrong: tuple[float, str]
    """By its own, decided with a constant wrong: the worst, and which constant."""
    wires: tuple[float, str]
    """The same with wires to choose as well."""

    @property
    def place(self) -> str:
        """Return model, ranks and profile."""
        return f"{self.layer.shape.name}, EP {self.layer.num_ranks}, {self.profile}"


def judge(layer: PlannedLayer, profile: str) -> Judged:
    """Plan `layer` for `profile` and hold it against all numbers of chunks."""
    rates = Rates.of(load_profile(profile), layer.num_ranks)
    decision = layer.decide(rates)
    chosen = decision.chosen.candidate
    return Judged(
        layer=layer,
        profile=profile,
        decision=decision,
        own=layer.regret(chosen, rates),
        simulate=layer.cluster_regret(profile, chosen.num_chunks),
        wrong=worst_regret(layer, rates),
        wires=worst_regret(layer, rates, lossy=True),
    )


def print_cells(judged: Sequence[Judged], console: Console) -> None:
    """Print one row per model, ranks and profile."""
    table = Table(title="Predicted: the planner's choice, and its regret")
    for heading in (
        "model", "EP", "profile", "N", "gain", "regret", "by simulate",
        "N, 20 % wrong", "wires, 20 % wrong",
    ):  # fmt: skip
        table.add_column(heading)
    for cell in judged:
        decision, shares = cell.decision, (cell.own, cell.simulate, cell.wrong[0], cell.wires[0])
        table.add_row(
            cell.layer.shape.name,
            str(cell.layer.num_ranks),
            cell.profile,
            str(decision.chosen.candidate.num_chunks),
            *(f"{share:.1%}" for share in (decision.gain, *shares)),
        )
    console.print(table)


def print_worst(judged: Sequence[Judged], console: Console) -> None:
    """Print the largest regret of each kind, and where."""
    table = Table(title=f"Worst of {len(judged)}")
    for heading in ("regret", "worst", "mean", "where", "constant"):
        table.add_column(heading)
    kinds = {
        "own prices": [(c.own, "", c) for c in judged],
        "prices of simulate": [(c.simulate, "", c) for c in judged],
        "N, a constant 20 % wrong": [(*c.wrong, c) for c in judged],
        "wires too, a constant 20 % wrong": [(*c.wires, c) for c in judged],
    }
    for kind, found in kinds.items():
        regret, constant, cell = max(found, key=lambda f: f[0])
        mean = sum(f[0] for f in found) / len(found)
        table.add_row(kind, f"{regret:.2%}", f"{mean:.2%}", cell.place, constant)
    console.print(table)


def main() -> int:
    """Judge every layer for every profile; print each, and the worst."""
    judged: list[Judged] = []
    for layer in layers():
        judged += [judge(layer, profile) for profile in PROFILES]
    console = Console(width=130)
    print_cells(judged, console)
    print_worst(judged, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
