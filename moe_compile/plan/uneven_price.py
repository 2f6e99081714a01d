"""Time of a flat exchange in chunks where experts are not chosen evenly: all ranks at once.

Contract
    A function of the region's work, the rates and a stated routing: the same on every rank.
    Tasks are those of `region_tasks`, with the rows that each chunk has on each rank. All ranks run
    them in the order that suits even ranks, the only order that a compiler knows.
    Where edges go by load, agreeing on them is counted: one all-gather of counts, and kernels.
    They are candidates only where they gain more than 1 % over even ones in as many chunks.
    Rows are expected numbers, in units of the rows that a rank has where all experts are as
    popular. Only the popularity of each expert is random, and it follows from a seed alone.

Pseudo-code
    popularity of each expert: `DRAWS` draws by stated seeds; the price is their mean
    chunks of each rank's experts: at even distances, or by the rows of each draw
    of ranks only those count that have most rows of some run of chunks
    a collective starts once it is at the front on every rank, and lasts as long as that of the rank
    with most rows of its chunk; it is slowed while any rank computes
    popularity[i] = (i + 1) ** -skew, shuffled by the seed
    share[e] = how likely e is among the distinct experts of a token, drawn by popularity
    rows[r][e] = share over the mean rank's, experts rank-major
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Final

from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork
from moe_compile.cost.tasks import COMPUTE, LINK, Task, TaskList, compute_stream, run_tasks
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.choose_plan import WORTH, Decision, Priced, Why, choose_plan
from moe_compile.plan.region_tasks import Load, fastest, tasks_of

DRAWS: Final = 4
"""Draws of the experts' popularity; seeds are 0 and on."""
COUNT_BYTES: Final = 4
AGREEING_KERNELS: Final = 8.0
"""Kernels that compute edges from all ranks' counts, before the first exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingSkew:
    """How unevenly experts are chosen."""

    skew: float
    """Exponent of the popularities: the i-th is proportional to i ** -skew."""
    rows_per_token: int
    """Distinct experts of a token."""


def uneven_us(work: RegionWork, candidate: Candidate, rates: Rates, routing: RoutingSkew) -> float:
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
    routing: RoutingSkew, num_local: int, num_ranks: int
) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Return for each draw the rows of each rank's experts, in units of an even rank's."""
    num_experts = num_local * num_ranks
    top_k = min(routing.rows_per_token, num_experts)
    return tuple(
        tuple(map(tuple, rows_of_ranks(shares, num_ranks)))
        for shares in (skewed_shares(routing.skew, num_experts, top_k, n) for n in range(DRAWS))
    )


def most_rows(draws: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the rows of the rank with most of them in units of an even rank's: the mean of draws.

    `draws` are lists of ranks, each with the rows of its experts.
    """
    return mean(max(map(sum, rows_of)) for rows_of in draws)


def all_ranks_us(
    work: RegionWork,
    candidate: Candidate,
    rates: Rates,
    rows_of: Sequence[Sequence[float]],
    groups_of: Sequence[Groups],
) -> float:
    """Return the time of all ranks, each in its groups of experts, each expert with its rows."""
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
    """Return the time in which the ranks agree on edges by load."""
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


Groups = tuple[tuple[int, ...], ...]
"""Local experts of each chunk, in the order in which chunks run."""


def skewed_shares(skew: float, num_experts: int, top_k: int, seed: int) -> list[float]:
    """Return the share of tokens that choose each expert; together `top_k`.

    >>> skewed_shares(0.0, 4, 2, seed=0)
    [0.5, 0.5, 0.5, 0.5]
    """
    weights = [float(i + 1) ** -skew for i in range(num_experts)]
    return shuffled(_distinct(weights, top_k), seed)


def shuffled(shares: Sequence[float], seed: int) -> list[float]:
    """Return `shares` in an order that follows from the seed alone."""
    found = list(shares)
    random.Random(seed).shuffle(found)
    return found


def _distinct(weights: Sequence[float], top_k: int) -> list[float]:
    """Return how likely each is among `top_k` distinct ones, drawn by `weights`.

    Each is drawn at a time of its own, exponential by its weight, and is among those where that
    comes before the time at which `top_k` have come on average.
    """
    if len(set(weights)) == 1:
        return [top_k / len(weights)] * len(weights)
    low, high = 0.0, 1e9
    for _ in range(200):
        time = (low + high) / 2
        come = [1 - math.exp(-time * weight) for weight in weights]
        low, high = (time, high) if sum(come) < top_k else (low, time)
    return come


def rows_of_ranks(shares: Sequence[float], num_ranks: int) -> list[list[float]]:
    """Return the rows of each rank's experts, in units of an even rank's."""
    local, mean = len(shares) // num_ranks, sum(shares) / num_ranks
    return [[share / mean for share in shares[rank * local :][:local]] for rank in range(num_ranks)]


def even_ranges(rows: Sequence[float], num: int) -> Groups:
    """Return ranges of equally many experts, as megamoe cuts them."""
    edges = [-(-c * len(rows) // num) for c in range(num + 1)]
    return _ranges(edges)


def ranges_by_load(rows: Sequence[float], num: int) -> Groups:
    """Return ranges of about as many rows each, at least one expert in each.

    An expert is in the chunk in which the middle of its rows lies.

    >>> ranges_by_load([4.0, 1.0, 1.0, 1.0], 2)
    ((0,), (1, 2, 3))
    """
    ends, local = list(itertools.accumulate(rows)), len(rows)
    middles = [2 * end - own for end, own in zip(ends, rows, strict=True)]
    edges = [0]
    for chunk in range(1, num):
        before = sum(middle * num < 2 * chunk * ends[-1] for middle in middles)
        edges.append(min(max(before, edges[-1] + 1), local - num + chunk))
    return _ranges([*edges, local])


def _ranges(edges: Sequence[int]) -> Groups:
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges))


def order_of(tasks: Sequence[Task], rates: Rates) -> list[int]:
    """Return the order in which a rank starts `tasks`."""
    named = [replace(task, name=str(index)) for index, task in enumerate(tasks)]
    return [int(span.name) for span in fastest(named, rates).spans]


def together_us(ranks: Sequence[Sequence[Task]], order: Sequence[int], rates: Rates) -> float:
    """Return when the last task of the last rank is over.

    Each rank has a compute stream of its own; all share the link, and each collective.
    """
    made, placed = TaskList(), [dict[int, int]() for _ in ranks]
    last: dict[str, int] = {}
    for index in order:
        is_shared = ranks[0][index].stream != COMPUTE
        needs = [[placed[r][i] for i in tasks[index].needs] for r, tasks in enumerate(ranks)]
        if is_shared:
            us = max(tasks[index].us for tasks in ranks)
            before = [last[LINK]] if LINK in last else []
            last[LINK] = made.add("", us, [*before, *itertools.chain(*needs)], LINK)
        for rank, tasks in enumerate(ranks):
            if not is_shared:
                stream = compute_stream(rank)
                before = [last[stream]] if stream in last else []
                us = tasks[index].us
                last[stream] = made.add("", us, [*before, *needs[rank]], stream)
            placed[rank][index] = last[LINK if is_shared else stream]
    return run_tasks(made.tasks, rates.contention, rates.overlap_slowdown).total_us


EDGES: Final = ("even", "load")


@dataclass(frozen=True, kw_only=True, slots=True)
class Uneven:
    """The choices for a flat exchange under a routing."""

    routing: RoutingSkew
    exchanged: Candidate
    """The number format of its rows; the number and edges of its chunks are the question."""
    numbers: tuple[int, ...]
    """Numbers of chunks to choose from, the region as it is first."""
    edges: tuple[str, ...]
    """Chunk edges to choose from; even ones where these leave no choice."""


@functools.lru_cache(maxsize=64)
def choose_uneven(
    work: RegionWork, rates: Rates, uneven: Uneven, allowed_bytes: float = float("inf")
) -> Decision:
    """Return how to run `work`; equal layers of a model have equal work."""
    known: dict[tuple[Candidate, Rates], float] = {}

    def price(work: RegionWork, candidate: Candidate, rates: Rates) -> float:
        us = known.get((candidate, rates))
        if us is None:
            us = known[candidate, rates] = uneven_us(work, candidate, rates, uneven.routing)
        return us

    def is_worth(candidate: Candidate) -> bool:
        even = replace(candidate, chunk_edges="even")
        is_open = candidate != even and "even" in uneven.edges
        limit = (1.0 - WORTH) * price(work, even, rates) if is_open else float("inf")
        return price(work, candidate, rates) < limit

    candidates = tuple(_candidates(work, uneven))
    worth = tuple(filter(is_worth, candidates))
    decision = choose_plan(
        work, rates, worth, lambda _: True, allowed_bytes=allowed_bytes, price=price
    )
    chosen = decision.chosen.candidate
    others = [replace(chosen, chunk_edges=e) for e in EDGES if e != chosen.chunk_edges]
    priced = [
        Priced(candidate=one, us=known[one, rates]) for one in others if (one, rates) in known
    ]
    is_gain_short = decision.why is Why.NO_OTHER and len(worth) < len(candidates)
    return replace(
        decision,
        why=Why.NO_GAIN if is_gain_short else decision.why,
        other_edges=priced[0] if priced else None,
        routing_skew=uneven.routing.skew,
    )


def _candidates(work: RegionWork, uneven: Uneven) -> Iterator[Candidate]:
    """Return each number of chunks, in each of the edges that it may have."""
    for num in uneven.numbers:
        has_choice = 1 < num < work.num_parts
        for edges in uneven.edges if has_choice else EDGES[:1]:
            yield replace(uneven.exchanged, num_chunks=num, chunk_edges=edges)
