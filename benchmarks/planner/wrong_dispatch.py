"""`python -m benchmarks.planner.wrong_dispatch`: the dispatch chosen with a constant 20 % wrong.

Contract
    Predicted, on eight ranks of a node with eight experts a token: the choice among all-to-all in
    chunks and gathered tokens by rates of which one is wrong, timed by the right ones, over the
    best of all ways.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from benchmarks.planner.chunk_choice import PROFILES, wrong_rates
from benchmarks.planner.dispatch_layers import GATHERED
from benchmarks.planner.simulated_dispatch import RANKS, SimulatedLayer, simulated_layers
from moe_compile.cost.rates import Rates
from moe_compile.hardware import load_profile
from moe_compile.plan.candidates import CHUNKS, Candidate
from moe_compile.plan.choose_plan import choose_plan
from moe_compile.plan.region_tasks import price_us


def wrong_regrets(layer: SimulatedLayer, profile: str) -> Iterator[tuple[float, str, Candidate]]:
    """Return the regret of what is chosen with each constant wrong, which, and what is chosen."""
    rates = Rates.of(load_profile(profile), RANKS)
    best = min(price_us(layer.work, way, rates) for way in layer.ways("auto"))
    nums = [num for num in CHUNKS if layer.work.num_parts % num == 0]
    ways = [*(Candidate(num_chunks=num) for num in nums), GATHERED]
    for name, wrong in wrong_rates(rates):
        chosen = choose_plan(layer.work, wrong, ways, lambda _: True).chosen.candidate
        yield price_us(layer.work, chosen, rates) / best - 1.0, name, chosen


def main() -> int:
    """Print the worst of each layer and profile."""
    table = Table(title="Predicted: dispatch chosen with a constant 20 % wrong, worst regret")
    for heading in ("model", "profile", "regret", "constant", "chosen"):
        table.add_column(heading)
    for layer in simulated_layers():
        for profile in PROFILES:
            regret, name, chosen = max(wrong_regrets(layer, profile), key=lambda found: found[0])
            table.add_row(layer.shape.name, profile, f"{regret:.1%}", name, str(chosen))
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
