"""Choose the number of chunks of experts, and their edges, under a stated skew of the routing.

Contract
    As of `choose_plan`, by the price of all ranks at once.
    Where both edges may be chosen, those by load are candidates only where they gain more than 1 %
    over even ones in as many chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.choose_plan import WORTH, Decision, Priced, Why, choose_plan
from moe_compile.plan.uneven_price import Routing, uneven_us

EDGES: Final = ("even", "load")


@dataclass(frozen=True, kw_only=True, slots=True)
class Uneven:
    """What of a flat exchange is to be decided under a routing."""

    routing: Routing
    exchanged: Candidate
    """How its rows travel; its chunks are what is asked."""
    numbers: tuple[int, ...]
    """Of chunks, the region as it is first."""
    edges: tuple[str, ...]
    """That chunks may have; even ones where these leave no choice."""


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
