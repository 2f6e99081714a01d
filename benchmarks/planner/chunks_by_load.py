"""`python -m benchmarks.planner.chunks_by_load`: what chunks of experts by load would gain.

Contract
    Every time is predicted, from stated popularities of experts: the tasks of the planner's price,
    with the rows that each chunk has on each rank, on all ranks at once. The number of chunks is
    the one that is fastest where all experts are as popular, as the planner takes them to be.
    What it costs to agree on chunks is counted, and for groups that are no ranges in the order
    of the experts one copy of their weights, which is the least that they take.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.planner.chunk_choice import layers
from benchmarks.planner.planned_models import SHAPES
from benchmarks.planner.stated_loads import ROUTINGS, any_groups, chosen_shares, ordered
from moe_compile.cost.hop_shape import MOVED
from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork
from moe_compile.hardware import load_profile
from moe_compile.plan.candidates import CHUNKS, Candidate
from moe_compile.plan.region_tasks import price_us
from moe_compile.plan.uneven_price import (
    DRAWS,
    EDGES,
    Groups,
    RoutingSkew,
    Uneven,
    agreeing_us,
    all_ranks_us,
    choose_uneven,
    even_ranges,
    most_rows,
    ranges_by_load,
    rows_of_ranks,
)

CELLS: Final = (
    ("qwen3-235b", 8, "h800"),
    ("deepseek-moe-16b", 8, "h800"),
    ("qwen3-30b", 16, "h100"),
    ("deepseek-v3", 32, "h800"),
    ("deepseek-v3", 64, "h100"),
)
SKEWS: Final = (0.25, 0.5, 1.0)
SEEDS: Final = range(DRAWS)
Way = Callable[[Sequence[float], int], Groups]
EVEN: Final = "even ranges"
BY_LOAD: Final = "ranges by load"
WHOLE: Final = "one chunk"
WAYS: Final[dict[str, Way]] = {
    EVEN: even_ranges,
    WHOLE: even_ranges,
    BY_LOAD: ranges_by_load,
    "even ranges, most rows first": ordered(even_ranges, "largest first"),
    "ranges by load, most rows first": ordered(ranges_by_load, "largest first"),
    "any groups, large ones inside": ordered(any_groups, "largest inside"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ByLoad:
    """One layer on one profile under one routing; times of forward and backward, means of seeds."""

    cell: tuple[str, int, str]
    num_chunks: int
    routing: str
    imbalance: float
    """Rows of the busiest rank over the mean."""
    us: dict[str, float]
    """By way, with all it costs."""

    def gain(self, way: str) -> float:
        """Return by which share of a step with `way` even ranges are slower."""
        return self.us[EVEN] / self.us[way] - 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Priced:
    """A layer in its chunks."""

    work: RegionWork
    num_chunks: int
    rates: Rates

    def us(self, way: str, rows_of: Sequence[Sequence[float]]) -> float:
        """Return the time of forward and backward, all ranks at once."""
        candidate = Candidate(num_chunks=1 if way == WHOLE else self.num_chunks)
        groups = [WAYS[way](rows, candidate.num_chunks) for rows in rows_of]
        us = all_ranks_us(self.work, candidate, self.rates, rows_of, groups)
        return us + self._cost_us(way)

    def _cost_us(self, way: str) -> float:
        """Return what it takes to agree on chunks, and to copy weights that lie in no ranges."""
        if way in (EVEN, WHOLE):
            return 0.0
        us = agreeing_us(self.work, self.rates)
        if way != BY_LOAD:
            weights = sum(w.weight_bytes for w in self.work.forward if w.is_chunked)
            us += self.rates.compute_us(0.0, MOVED * weights, 1)
        return us


def predict() -> Iterator[ByLoad]:
    """Return every cell under every routing."""
    shapes = {shape.name: shape for shape in SHAPES}
    for name, num_ranks, profile in CELLS:
        shape = shapes[name]
        (layer,) = layers([(shape, num_ranks)])
        rates = Rates.of(load_profile(profile), num_ranks)
        prices = {
            n: price_us(layer.work, Candidate(num_chunks=n), rates)
            for n in CHUNKS
            if layer.work.num_parts % n == 0
        }
        num_chunks = min(prices, key=lambda n: prices[n])
        priced = _Priced(work=layer.work, num_chunks=num_chunks, rates=rates)
        for routing in ROUTINGS:
            drawn = [
                rows_of_ranks(
                    chosen_shares(routing, shape.num_experts, shape.top_k, seed), num_ranks
                )
                for seed in (SEEDS if routing != "even" else SEEDS[:1])
            ]
            yield ByLoad(
                cell=(name, num_ranks, profile),
                num_chunks=num_chunks,
                routing=routing,
                imbalance=most_rows(drawn),
                us={way: mean(priced.us(way, rows_of) for rows_of in drawn) for way in WAYS},
            )


def choose() -> Iterator[tuple[tuple[str, int, str], dict[float, Candidate]]]:
    """Return for every cell what "auto" chooses under each stated skew."""
    shapes = {shape.name: shape for shape in SHAPES}
    for cell in CELLS:
        name, num_ranks, profile = cell
        (layer,) = layers([(shapes[name], num_ranks)])
        rates, chosen = Rates.of(load_profile(profile), num_ranks), {}
        for skew in SKEWS:
            uneven = Uneven(
                routing=RoutingSkew(skew=skew, rows_per_token=shapes[name].top_k),
                exchanged=Candidate(),
                numbers=tuple(n for n in CHUNKS if layer.work.num_parts % n == 0),
                edges=EDGES,
            )
            chosen[skew] = choose_uneven(layer.work, rates, uneven).chosen.candidate
        yield cell, chosen


def _print_choices(console: Console) -> None:
    table = Table(title='What "auto" chooses, by routing_skew')
    for heading in ("layer", *(f"Zipf {skew:g}" for skew in SKEWS)):
        table.add_column(heading)
    for (name, num_ranks, profile), chosen in choose():
        table.add_row(f"{name}, {num_ranks}, {profile}", *map(str, chosen.values()))
    console.print(table)


def main() -> int:
    """Print a line for each layer and routing, then what "auto" chooses."""
    table = Table(title="Predicted: ms in even ranges, and what chunks by load gain")
    for heading in ("layer", "N", "routing", "busiest rank", *WAYS):
        table.add_column(heading)
    for one in predict():
        name, num_ranks, profile = one.cell
        table.add_row(
            f"{name}, {num_ranks}, {profile}",
            str(one.num_chunks),
            one.routing,
            f"{one.imbalance:.2f}",
            f"{one.us[EVEN] / 1e3:.2f}",
            *(f"{one.gain(way):.1%}" for way in WAYS if way != EVEN),
        )
    console = Console(width=140)
    console.print(table)
    _print_choices(console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
