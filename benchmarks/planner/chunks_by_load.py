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
from benchmarks.planner.ranks_together import order_of, together_us
from benchmarks.planner.stated_loads import (
    ROUTINGS,
    Groups,
    any_groups,
    chosen_shares,
    even_ranges,
    ordered,
    ranges_by_load,
    rows_of_ranks,
)
from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork
from moe_compile.hardware import load_profile
from moe_compile.plan.candidates import CHUNKS, Candidate
from moe_compile.plan.region_tasks import ROW_PASSES, Load, price_us, tasks_of

CELLS: Final = (
    ("qwen3-235b", 8, "h800"),
    ("deepseek-moe-16b", 8, "h800"),
    ("qwen3-30b", 16, "h100"),
    ("deepseek-v3", 32, "h800"),
    ("deepseek-v3", 64, "h100"),
)
SEEDS: Final = range(4)
COUNT_BYTES: Final = 4
AGREEING_KERNELS: Final = 8.0
"""That make edges of all ranks' counts, before the first exchange."""
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
    num_experts: int
    num_chunks: int
    rates: Rates

    def us(self, way: str, rows_of: Sequence[Sequence[float]]) -> float:
        """Return the time of forward and backward, all ranks at once."""
        candidate = Candidate(num_chunks=1 if way == WHOLE else self.num_chunks)
        groups = [WAYS[way](rows, candidate.num_chunks) for rows in rows_of]
        of_chunks = [
            [sum(rows[e] for e in group) for group in of_rank]
            for of_rank, rows in zip(groups, rows_of, strict=True)
        ]
        most = [max(chunk) for chunk in zip(*of_chunks, strict=True)]
        ranks = []
        for rank in _ranks_that_count(of_chunks):
            loads = [
                Load(rows=rows, sent=sent, weights=len(group) / len(rows_of[rank]))
                for rows, sent, group in zip(of_chunks[rank], most, groups[rank], strict=True)
            ]
            ranks.append(tasks_of(self.work, candidate, self.rates, loads))
        even = tasks_of(self.work, candidate, self.rates)
        total = 0.0
        for phase, of_phase in zip(even, zip(*ranks, strict=True), strict=True):
            total += together_us(of_phase, order_of(phase, self.rates), self.rates)
        return total + self._cost_us(way)

    def _cost_us(self, way: str) -> float:
        """Return what it takes to agree on chunks, and to copy weights that lie in no ranges."""
        if way in (EVEN, WHOLE):
            return 0.0
        sent = (self.rates.num_ranks - 1) * self.num_experts * COUNT_BYTES
        us = self.rates.link_us(sent, is_gather=True) + self.rates.compute_us(
            0.0, 0.0, AGREEING_KERNELS
        )
        if way != BY_LOAD:
            weights = sum(w.weight_bytes for w in self.work.forward if w.is_chunked)
            us += self.rates.compute_us(0.0, ROW_PASSES * weights, 1)
        return us


def _ranks_that_count(of_chunks: Sequence[Sequence[float]]) -> list[int]:
    """Return the ranks that have most rows of some run of chunks.

    No other can hold up a collective: between two of them a rank computes a run of chunks.
    """
    num, ranks = len(of_chunks[0]), range(len(of_chunks))
    runs = [(a, b) for a in range(num) for b in range(a + 1, num + 1)]
    return sorted({max(ranks, key=lambda r: sum(of_chunks[r][a:b])) for a, b in runs})


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
        priced = _Priced(
            work=layer.work, num_experts=shape.num_experts, num_chunks=num_chunks, rates=rates
        )
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
                imbalance=mean(max(map(sum, rows_of)) for rows_of in drawn),
                us={way: mean(priced.us(way, rows_of) for rows_of in drawn) for way in WAYS},
            )


def main() -> int:
    """Print a line for each layer and routing."""
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
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
