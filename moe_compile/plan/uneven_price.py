"""Time of a flat exchange in chunks where experts are not chosen evenly: all ranks at once.

Contract
    A function of the region's work, the rates and a stated routing: the same on every rank.
    Tasks are those of `region_tasks`, with the rows that each chunk has on each rank. All ranks run
    them in the order that suits even ranks, which is all that a compiler knows.
    Where edges go by load, agreeing on them is counted: one all-gather of counts, and kernels.

Pseudo-code
    which expert is how popular: `DRAWS` draws by stated seeds; the price is their mean
    chunks of each rank's experts: at even distances, or by the rows of each draw
    of ranks only those count that have most rows of some run of chunks
    an exchange lasts as long as that of the rank with most rows of its chunk
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Final

from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.ranks_together import order_of, together_us
from moe_compile.plan.region_tasks import Load, tasks_of
from moe_compile.plan.stated_loads import (
    Groups,
    even_ranges,
    ranges_by_load,
    rows_of_ranks,
    skewed_shares,
)

DRAWS: Final = 4
"""Of which expert is how popular; seeds are 0 and on."""
COUNT_BYTES: Final = 4
AGREEING_KERNELS: Final = 8.0
"""That make edges of all ranks' counts, before the first exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How unevenly experts are chosen."""

    skew: float
    """Exponent by which popularities fall: that of the i-th is as i ** -skew."""
    rows_per_token: int
    """Distinct experts of a token."""


def uneven_us(work: RegionWork, candidate: Candidate, rates: Rates, routing: Routing) -> float:
    """Return the time of forward and backward of `work` run as `candidate` says, mean of draws."""
    cut = ranges_by_load if candidate.chunk_edges == "load" else even_ranges
    times = []
    for rows_of in drawn_rows(routing, work.num_parts, work.num_ranks):
        groups = [cut(rows, candidate.num_chunks) for rows in rows_of]
        times.append(all_ranks_us(work, candidate, rates, rows_of, groups))
    extra = agreeing_us(work, rates) if candidate.chunk_edges == "load" else 0.0
    return mean(times) + extra


@functools.lru_cache(maxsize=16)
def drawn_rows(
    routing: Routing, num_local: int, num_ranks: int
) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Return for each draw the rows of each rank's experts, in units of an even rank's."""
    num_experts = num_local * num_ranks
    top_k = min(routing.rows_per_token, num_experts)
    return tuple(
        tuple(map(tuple, rows_of_ranks(shares, num_ranks)))
        for shares in (skewed_shares(routing.skew, num_experts, top_k, n) for n in range(DRAWS))
    )


def all_ranks_us(
    work: RegionWork,
    candidate: Candidate,
    rates: Rates,
    rows_of: Sequence[Sequence[float]],
    groups_of: Sequence[Groups],
) -> float:
    """Return how long all ranks take, each in its groups of experts, each expert with its rows."""
    of_chunks = [
        [sum(rows[expert] for expert in group) for group in groups]
        for groups, rows in zip(groups_of, rows_of, strict=True)
    ]
    most = [max(chunk) for chunk in zip(*of_chunks, strict=True)]
    ranks = []
    for rank in _ranks_that_count(of_chunks):
        loads = [
            Load(rows=rows, sent=sent, weights=len(group) / len(rows_of[rank]))
            for rows, sent, group in zip(of_chunks[rank], most, groups_of[rank], strict=True)
        ]
        ranks.append(tasks_of(work, candidate, rates, loads))
    orders = _orders(work, replace(candidate, chunk_edges="even"), rates)
    phases = zip(orders, zip(*ranks, strict=True), strict=True)
    return sum(together_us(of_ranks, order, rates) for order, of_ranks in phases)


def agreeing_us(work: RegionWork, rates: Rates) -> float:
    """Return what it takes the ranks to agree on edges by load."""
    sent = (rates.num_ranks - 1) * work.num_parts * work.num_ranks * COUNT_BYTES
    return rates.link_us(sent, is_gather=True) + rates.compute_us(0.0, 0.0, AGREEING_KERNELS)


@functools.lru_cache(maxsize=8)
def _orders(work: RegionWork, candidate: Candidate, rates: Rates) -> tuple[tuple[int, ...], ...]:
    """Return the order of tasks, forward and backward, that suits even ranks."""
    even = tasks_of(work, candidate, rates)
    return tuple(tuple(order_of(phase, rates)) for phase in even)


def _ranks_that_count(of_chunks: Sequence[Sequence[float]]) -> list[int]:
    """Return the ranks that have most rows of some run of chunks.

    No other can hold up a collective: between two of them a rank computes a run of chunks.
    """
    num, ranks = len(of_chunks[0]), range(len(of_chunks))
    runs = [(a, b) for a in range(num) for b in range(a + 1, num + 1)]
    return sorted({max(ranks, key=lambda r: sum(of_chunks[r][a:b])) for a, b in runs})
