"""Choose how a region runs: the candidate with the least regret, whatever constant is wrong.

Contract
    A pure function of the region's work, the rates and the allowed candidates: order of
    candidates, rank and time of day do not matter.
    A candidate that the caller does not allow, as one that may change a bit, is advice.
    `choose_parts` chooses the number of parts of the batch that a program runs in, a pure function
    of the predictions of the numbers traced.

Pseudo-code
    candidates = those allowed that gain more than 1 % over the region as it is, and fit the memory
    price each with the constants as stated, and with each constant perturbed by its uncertainty
    of those that under no perturbation lose more than half of their gain as stated, and
    as stated are within 2 % of the fastest such,
        take the one whose largest regret is smallest; of equal ones the simplest
        (regret: time over that of the fastest candidate under the same perturbation, less 1)
    none: the region as it is

    parts: candidates = programs in parts that gain more than 1 % over the whole, fit the memory,
        and with no constant off lose more than half of their gain as stated
    take the fastest; of those within 0.2 % of it the one of fewest parts; none: the whole

`least_us` is a lower bound of a candidate's time, much quicker to compute than its price
`region_tasks.price_us`. Chunks, joins, packing and the slowdowns of compute and exchanges only
add to the times summed here.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.cost.tasks import COMPUTE, LINK, STREAMS, TaskList
from moe_compile.journal.entries import Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.candidates import Candidate, goes_in_hops
from moe_compile.plan.region_tasks import add_hops, price_us
from moe_compile.plan.row_folds import folds_of

Price = Callable[[RegionWork, Candidate, Rates], float]
"""Function that returns the time of forward and backward."""
WORTH: Final = 0.01
"""Gain from which the region may be changed."""
TIE: Final = 0.002
"""Regret below which two candidates count as equally good: the simpler is taken."""
HEDGE: Final = 0.02
"""Largest loss, where all constants are right, paid to be less far off where one is wrong: the
distance from the fastest that a choice may have."""
RISK: Final = 0.5
"""Largest share of the stated gain that one wrong constant may turn into a loss against the region
as it is. At 0, gains of 3 % are given up that might be losses of 0.3 to 1.2 % (docs/planner.md)."""
EXTRA_COPIES: Final = 2.0
"""Shares of a chunked region's rows alive beside those of the whole one, where generated code does
not sort and join them in neighbouring kernels: sorted rows, and joined ones. Slices, of heads and
of experts with a capacity, are always taken to have them; no generated code was read for that."""


class Why(enum.Enum):
    """The ground of a decision. Values are printed in reports."""

    FASTEST = (
        "it gains, and stays closest to the fastest candidate if any one number of the hardware "
        "profile is wrong"
    )
    NO_OTHER = "there is no other candidate"
    NO_GAIN = "no other candidate gains more than 1 %"
    UNSURE = (
        "candidates that gain more than 1 % might lose over half of their gain if one number of "
        "the hardware profile is wrong"
    )
    MEMORY = "candidates that gain more than 1 % need more memory than max_memory_increase allows"


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """One candidate and its predicted time."""

    candidate: Candidate
    us: float
    """Time of forward and backward of the work around the region."""
    is_lossy: bool = False
    """Whether the candidate may change a bit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The candidate that a region runs as, and those it was compared with."""

    chosen: Priced
    as_it_is: Priced
    runner_up: Priced | None
    """The fastest of the other allowed candidates."""
    why: Why
    other_dispatch: Priced | None = None
    """The fastest allowed candidate with the other dispatch."""
    other_edges: Priced | None = None
    """The chosen candidate with the other chunk edges, where both were priced."""
    routing_skew: float = 0.0
    """Routing skew assumed by the prices, as the option names it."""
    ranked: tuple[Priced, ...] = ()
    """All allowed candidates, the fastest first."""
    advice: tuple[Priced, ...] = ()
    """Candidates not allowed that are over 1 % faster than the chosen, the fastest first: each kind
    in about as many chunks, the fastest kind in any number."""

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
        """Return the share by which the runner-up is slower; below 0 if faster but less sure."""
        return self.runner_up.us / self.chosen.us - 1.0 if self.runner_up else 0.0


def choose_plan(
    work: RegionWork,
    rates: Rates,
    candidates: Sequence[Candidate],
    is_allowed: Callable[[Candidate], bool],
    *,
    allowed_bytes: float = float("inf"),
    price: Price = price_us,
) -> Decision:
    """Return how to run `work`, of the `candidates` that are allowed.

    The first allowed one is the region as it is. `allowed_bytes` may be added to the peak. No
    `price` is below `least_us`.
    """

    def priced(candidates: Iterable[Candidate]) -> list[Priced]:
        return [
            Priced(candidate=c, us=price(work, c, rates), is_lossy=c.is_lossy(work))
            for c in candidates
        ]

    allowed = priced(c for c in candidates if is_allowed(c))
    forbidden = [c for c in candidates if not is_allowed(c)]
    as_it_is = allowed[0]
    gaining = [one for one in allowed if one.us < (1.0 - WORTH) * as_it_is.us]
    fitting = [one for one in gaining if extra_bytes(work, one.candidate) <= allowed_bytes]
    regrets = _safe_regrets(work, rates, as_it_is, fitting, price)
    chosen = min(regrets, key=lambda one: _place(one, regrets), default=as_it_is)
    why = Why.FASTEST
    if chosen is as_it_is:
        why = Why.UNSURE if fitting else Why.MEMORY if gaining else Why.NO_GAIN
        why = why if len(allowed) > 1 else Why.NO_OTHER
    others = [p for p in allowed if p is not chosen]
    switched = [p for p in others if p.candidate.dispatch != chosen.candidate.dispatch]
    limit = (1.0 - WORTH) * chosen.us
    worth = [c for c in forbidden if least_us(work, c, rates) < limit]
    faster = [p for p in _advice(worth, chosen.candidate, priced) if p.us < limit]
    return Decision(
        chosen=chosen,
        as_it_is=as_it_is,
        runner_up=min(others, key=lambda p: p.us, default=None),
        why=why,
        other_dispatch=min(switched, key=lambda p: p.us, default=None),
        ranked=tuple(sorted(allowed, key=lambda p: (p.us, p.candidate.complexity))),
        advice=tuple(sorted(faster, key=lambda p: p.us)),
    )


def _advice(
    candidates: Iterable[Candidate],
    chosen: Candidate,
    priced: Callable[[Iterable[Candidate]], list[Priced]],
) -> list[Priced]:
    """Return candidates that may be advised, priced: not each in every number of chunks.

    Each kind in the number nearest to that of the `chosen`; the fastest of these in all others.
    """
    kinds: dict[Candidate, list[Candidate]] = {}
    for one in candidates:
        kinds.setdefault(replace(one, num_chunks=0), []).append(one)

    def distance(one: Candidate) -> float:
        return abs(math.log2(one.num_chunks / chosen.num_chunks))

    nearest = priced(min(kind, key=distance) for kind in kinds.values())
    if not nearest:
        return []
    best = min(nearest, key=lambda p: p.us).candidate
    others = [one for one in kinds[replace(best, num_chunks=0)] if one != best]
    return nearest + priced(others)


def extra_bytes(work: RegionWork, candidate: Candidate) -> float:
    """Return the bytes alive at once beside those of the region as it is, estimated."""
    chosen = work.by_dispatch(candidate.dispatch)
    extra = max(0.0, chosen.written_bytes - work.written_bytes)
    in_place = not (work.writes_joined or work.in_slices)
    if candidate.nodes != "off" and work.hops is not None:
        # rows of hop 1, and of a chunk of hop 2 before they are put in order
        far = work.hops.nodes_per_token / work.hops.rows_per_token
        extra += work.row_bytes * (1.0 / candidate.num_chunks + far)
    has_copies = candidate.num_chunks > 1 and not in_place
    return extra + (EXTRA_COPIES * chosen.row_bytes if has_copies else 0.0)


def _safe_regrets(
    work: RegionWork, rates: Rates, as_it_is: Priced, others: Sequence[Priced], price: Price
) -> dict[Priced, float]:
    """Return the largest regret of each of `others` that no perturbation makes lose much.

    A wrong constant should neither turn a gain into a loss, beyond `RISK`, nor leave a candidate
    far behind the one that would have been taken with the right constant.
    """
    all_rates = (rates, *rates.perturbed())

    def times(one: Priced) -> list[float]:
        return [one.us, *(price(work, one.candidate, r) for r in all_rates[1:])]

    was, known = times(as_it_is) if others else [], []
    safe: dict[Priced, list[float]] = {}
    behind = sorted(others, key=lambda one: one.us)
    while behind and behind[0].us <= (1.0 + HEDGE) * min((p.us for p in safe), default=math.inf):
        one = behind.pop(0)
        known.append(own := times(one))
        limit = 1.0 + RISK * (1.0 - one.us / as_it_is.us)
        if all(us < limit * whole for us, whole in zip(own, was, strict=True)):
            safe[one] = own
    if not safe:
        return {}
    best = [min(of_rates) for of_rates in zip(was, *known, strict=True)]
    left = 1.0 - max((share for _, share in rates.uncertainty), default=0.0)  # of any time
    for place, r in enumerate(all_rates):
        for one in behind:  # most cannot be the fastest: their bound is quicker to tell
            if one.us * left < best[place] and least_us(work, one.candidate, r) < best[place]:
                best[place] = min(best[place], price(work, one.candidate, r))
    return {
        one: max(us / least - 1.0 for us, least in zip(own, best, strict=True))
        for one, own in safe.items()
    }


def _place(one: Priced, regrets: Mapping[Priced, float]) -> tuple[object, ...]:
    """Return the sort key of a candidate: those near the best by how simple they are."""
    near = regrets[one] <= min(regrets.values()) + TIE
    return not near, 0.0 if near else regrets[one], one.candidate.complexity


def least_us(work: RegionWork, candidate: Candidate, rates: Rates) -> float:
    """Return the time of forward and backward if each hid all of compute or all of exchanges."""
    work = work.by_dispatch(candidate.dispatch)
    total = 0.0
    for phase in work.phases:
        busy = dict.fromkeys(STREAMS, 0.0)
        folds = folds_of(work, phase, candidate)
        for index, one in enumerate(phase):
            way = candidate, rates, phase is work.forward, index in folds.fed
            for stream, us in _busy(work, folds.left_of(index, one), *way).items():
                busy[stream] += us
        total += max(busy.values())
    return total


def _busy(
    work: RegionWork,
    one: Work,
    candidate: Candidate,
    rates: Rates,
    is_forward: bool,
    is_fed: bool,
) -> dict[str, float]:
    """Return the least time that one work takes on each stream."""
    rows = work.imbalance if one.is_chunked else 1.0
    in_hops = candidate.nodes != "off"
    if in_hops and goes_in_hops(one, candidate.nodes, is_forward=is_forward):
        in_one_part, made = replace(candidate, num_chunks=1, hop_slices=1), TaskList()
        add_hops(made, work, one, in_one_part, rates, [[]], is_forward, is_fed=is_fed)
        return {s: sum(t.us for t in made.tasks if t.stream == s) for s in STREAMS}
    if one.exchange:
        share = candidate.wire_share(work, one.exchange, is_forward=is_forward)
        share *= work.slots_per_row(one.exchange, candidate.num_chunks)
        sent = one.link_bytes * rows * share
        link_us = rates.link_us(sent, is_gather=one.is_gather)
        return {COMPUTE: rates.op_overhead_us, LINK: link_us}
    moved = one.nbytes * rows + one.weight_bytes
    operations, product = one.operations * rows, one.product
    if product is not None and one.is_chunked:  # a part may fill a device better
        operations, product = operations / max(rates.large_product_rate, 1.0), None
    return {COMPUTE: rates.compute_us(operations, moved, one.num_kernels, product)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedProgram:
    """A program in so many parts, and its predicted time, forward and backward."""

    num_parts: int
    chunks: int | str
    """The value of the option `chunks` it was compiled with."""
    us: float
    off_us: tuple[float, ...]
    """Predicted times with one constant of the profile off, for each constant, up and down."""
    peak_bytes: int

    def __str__(self) -> str:
        """Return its name in reports."""
        parts = "whole" if self.num_parts == 1 else f"{self.num_parts} parts"
        parts += " of one chunk" * (self.num_parts > 1 and self.chunks == 1)
        return f"{parts}, {self.us / 1e3:.2f} ms"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsDecision:
    """The number of parts of the batch that a program runs in, and why no more."""

    num_parts: int = 1
    chunks: int | str = "auto"
    """The value of the option `chunks` from here on."""
    left: Verdict | None = None
    """Why it runs whole; None where it does not, or has nothing to divide."""
    whole_us: float = 0.0
    """Predicted time of the whole; 0 where nothing was predicted."""
    us: float = 0.0
    """Predicted time of the program chosen; 0 where nothing was predicted."""

    @property
    def measures(self) -> dict[str, float]:
        """Return the predictions for reports; {} without any."""
        if not self.whole_us:
            return {}
        return {"predicted_us_before": self.whole_us, "predicted_us": self.us}


def choose_parts(
    whole: TriedProgram, others: Sequence[TriedProgram], allowed_bytes: float
) -> tuple[TriedProgram, Reason | None]:
    """Return the program to run, and why it is the whole if it is.

    The peak of live bytes may exceed that of the whole by `allowed_bytes`.
    """
    gaining = [one for one in others if one.us < (1.0 - WORTH) * whole.us]
    fitting = [one for one in gaining if one.peak_bytes - whole.peak_bytes <= allowed_bytes]
    safe = [one for one in fitting if _is_safe(one, whole)]
    if not safe:
        return whole, Reason.MEMORY_CAP if gaining and not fitting else Reason.BY_PRICE
    limit = (1.0 + TIE) * min(one.us for one in safe)
    near = [one for one in safe if one.us <= limit]
    return min(near, key=lambda one: (one.num_parts, one.chunks != 1, one.us)), None


def _is_safe(one: TriedProgram, whole: TriedProgram) -> bool:
    limit = 1.0 + RISK * (1.0 - one.us / whole.us)
    pairs = zip(one.off_us, whole.off_us, strict=True)
    return all(own < limit * as_whole for own, as_whole in pairs)
