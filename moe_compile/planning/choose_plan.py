"""Choose how a region runs: the fastest by price, if the gain is large enough and sure enough.

Contract
    A pure function of the region's work, the rates and what may be chosen: order of candidates,
    rank and time of day do not matter.
    What the caller does not allow, as what changes a bit, is advice.

Pseudo-code
    ways = those allowed that gain more than 1 % over the region as it is
    for each, the fastest in the mean over constants moved by their uncertainty first:
        (of near ones the simplest)
        take it if memory allows, and it gains with every constant moved
    none taken: the region as it is
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moe_compile.planning.candidates import Candidate
from moe_compile.planning.rates import Rates
from moe_compile.planning.region_tasks import price_us
from moe_compile.planning.region_work import RegionWork

WORTH: Final = 0.01
"""Gain that is enough to leave the region other than it is."""
TIE: Final = 0.002
"""Share of the time below which two ways count as equally fast: the simpler is taken."""
EXTRA_COPIES: Final = 2.0
"""Of a chunked region's rows that are alive beside those of the whole one: sorted, and joined."""


class Why(enum.Enum):
    """What decided. Values are what reports print."""

    FASTEST = "the fastest, and faster whichever constant is off by its uncertainty"
    NO_OTHER = "there is no other way"
    NO_GAIN = "no other way gains more than 1 %"
    UNSURE = "what gains more than 1 % would lose if a constant is off by its uncertainty"
    MEMORY = "what gains more than 1 % needs more memory than max_memory_increase allows"


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """One way and its predicted time."""

    candidate: Candidate
    us: float
    """Forward and backward of the work around the region."""
    is_lossy: bool = False
    """Whether it may change a bit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The way a region runs, and what it was chosen against."""

    chosen: Priced
    as_it_is: Priced
    runner_up: Priced | None
    """The fastest of the other ways that may be chosen."""
    why: Why
    advice: tuple[Priced, ...] = ()
    """Ways that were not allowed, faster than the chosen by more than 1 %; the fastest first."""

    @property
    def gathers(self) -> bool:
        """Whether tokens are gathered instead of rows exchanged."""
        return self.chosen.candidate.dispatch == "all_gather"

    @property
    def gain(self) -> float:
        """Return the share of time the choice saves over the region as it is."""
        return 1.0 - self.chosen.us / self.as_it_is.us

    @property
    def margin(self) -> float:
        """Return the share by which the runner-up is slower; below 0 where it was not safe."""
        return self.runner_up.us / self.chosen.us - 1.0 if self.runner_up else 0.0


def choose_plan(
    work: RegionWork,
    rates: Rates,
    candidates: Sequence[Candidate],
    is_allowed: Callable[[Candidate], bool],
    *,
    allowed_bytes: float = float("inf"),
) -> Decision:
    """Return the way to run `work`, of the `candidates` that are allowed.

    The first allowed one is the region as it is. `allowed_bytes` may be added to the peak.
    """
    priced = [
        Priced(candidate=c, us=price_us(work, c, rates), is_lossy=c.is_lossy(work))
        for c in candidates
    ]
    ways = [p for p in priced if is_allowed(p.candidate)]
    as_it_is = ways[0]
    chosen, why = as_it_is, Why.NO_GAIN if len(ways) > 1 else Why.NO_OTHER
    shares = _moved_shares(work, rates, as_it_is, ways)
    for way in _by_mean(shares):
        if extra_bytes(work, way.candidate) > allowed_bytes:
            why = Why.MEMORY
        elif max(shares[way]) >= 1.0:
            why = Why.UNSURE
        else:
            chosen, why = way, Why.FASTEST
            break
    others = [p for p in ways if p is not chosen]
    faster = [p for p in priced if p not in ways and p.us < (1.0 - WORTH) * chosen.us]
    return Decision(
        chosen=chosen,
        as_it_is=as_it_is,
        runner_up=min(others, key=lambda p: p.us, default=None),
        why=why,
        advice=tuple(sorted(faster, key=lambda p: p.us)),
    )


def extra_bytes(work: RegionWork, candidate: Candidate) -> float:
    """Return the bytes alive at once beside those of the region as it is, estimated."""
    if candidate.dispatch == "all_gather":
        assert work.gathered is not None
        work = work.gathered
    return work.extra_bytes + (EXTRA_COPIES * work.row_bytes if candidate.num_chunks > 1 else 0.0)


def _moved_shares(
    work: RegionWork, rates: Rates, as_it_is: Priced, ways: Sequence[Priced]
) -> dict[Priced, list[float]]:
    """Return, for ways that gain enough, their time over that of the region as it is.

    One number per constant moved; a constant that is wrong should neither make a loss of a gain
    nor one way of many look best.
    """
    gaining = [way for way in ways if way.us < (1.0 - WORTH) * as_it_is.us]
    if not gaining:
        return {}
    moved = [(r, price_us(work, as_it_is.candidate, r)) for r in rates.moved()]
    return {
        way: [way.us / as_it_is.us, *(price_us(work, way.candidate, r) / us for r, us in moved)]
        for way in gaining
    }


def _by_mean(shares: Mapping[Priced, Sequence[float]]) -> list[Priced]:
    """Return the ways by mean share; of those as good as the best the simplest is first."""
    mean = {way: sum(found) / len(found) for way, found in shares.items()}
    limit = min(mean.values(), default=0.0) * (1.0 + TIE)

    def place(way: Priced) -> tuple[object, ...]:
        near = mean[way] <= limit
        return not near, 0.0 if near else mean[way], way.candidate.complexity

    return sorted(mean, key=place)
