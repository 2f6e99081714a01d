"""The schedule to use: the fastest of several candidates that memory allows.

Contract
    Keeps every precedence and the order of launches of the problem.
    The peak of live bytes stays within the allowance over the graph as it came, unless the order
    of launches alone already breaks it; then the graph's own order with that change is returned.
    The graph as it came wins ties, then the smaller peak; of orders that differ in nothing but when
    they launch, the one with the earliest launches that memory allows.

Pseudo-code
    for each reach, from unlimited down: how far a node may overtake others
        schedule by every policy; keep those within the memory allowance
        the first reach with any left decides: the fastest, on the link assumed and a slower one
    launch as early as what is sent is there, unless that is slower or memory forbids it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from moe_compile.schedule.launch_early import launch_early
from moe_compile.schedule.list_schedule import (
    Policy,
    graph_order,
    incoming_order,
    list_schedule,
    longest_path,
    nearest_launch,
)
from moe_compile.schedule.liveness import Liveness
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import simulate

POLICIES: Final = (
    (nearest_launch, 0.0),
    (nearest_launch, 0.5),
    (nearest_launch, 1.0),
    (graph_order, 0.0),
    (graph_order, 0.5),
    (longest_path, 0.0),
)
"""Priorities and patience that each won on some graph."""
SMALLEST_WINDOW: Final = 16
"""Nodes; below it a schedule cannot differ from the graph's order in anything that matters."""
SLOW_LINK: Final = 1.5
"""A schedule should also hide exchanges that take this many times as long as estimated."""
TIE: Final = 0.002
"""Share of the step below which two schedules count as equally fast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One order and what it costs."""

    order: tuple[int, ...]
    peak_bytes: int
    score_us: float
    """Sum of the step's times on the link assumed and on the slow one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The schedule to use, and what it was chosen against."""

    chosen: Candidate
    as_it_came: Candidate
    is_capped: bool
    """Whether memory forbade a faster schedule."""


def choose_schedule(
    problem: ScheduleProblem,
    liveness: Liveness,
    max_memory_increase: float,
    step_peak_bytes: int = 0,
    is_chunked: bool = False,
) -> Choice:
    """Return the fastest schedule whose peak rises by at most the allowed fraction.

    The rise counts from the graph's own peak, as if it had not been chunked: chunks one after
    another hold less than all rows at once, and that saving is there to be spent. The fraction is
    of `step_peak_bytes`, the peak of a whole training step, where that is known and larger.
    """
    came = _candidate(problem, liveness, tuple(range(len(problem.nodes))))
    baseline = _candidate(problem, liveness, incoming_order(problem))
    whole = came.peak_bytes
    if is_chunked:
        whole = max(whole, liveness.peak_bytes(side_by_side(problem)))
    allowed = whole + max_memory_increase * max(whole, step_peak_bytes)
    is_capped = False
    for window in _windows(len(problem.nodes)):
        candidates = [baseline, *_scheduled(problem, liveness, window)]
        fitting = [c for c in candidates if c.peak_bytes <= allowed]
        best = _fastest(fitting or [baseline])
        if best is not baseline:
            break
        is_capped |= _fastest(candidates) is not baseline
        if not is_capped:
            break
    is_capped |= len(fitting) < len(candidates) and _fastest(candidates) is not best
    early = _candidate(problem, liveness, launch_early(problem, best.order))
    fits = early.peak_bytes <= max(best.peak_bytes, allowed)
    chosen = early if fits and _ties(early, best) else best
    return Choice(chosen=chosen, as_it_came=came, is_capped=is_capped)


def side_by_side(problem: ScheduleProblem) -> tuple[int, ...]:
    """Return the nodes by depth: the same step of all chunks together, as if they were one."""
    depth: list[int] = []
    for node in range(len(problem.nodes)):
        depth.append(1 + max((depth[p] for p in problem.before[node]), default=-1))
    return tuple(sorted(range(len(problem.nodes)), key=depth.__getitem__))


def _windows(num_nodes: int) -> Iterator[int | None]:
    yield None
    window = num_nodes // 2
    while window >= SMALLEST_WINDOW:
        yield window
        window //= 2


def _scheduled(
    problem: ScheduleProblem, liveness: Liveness, window: int | None
) -> Iterator[Candidate]:
    for key, patience in POLICIES:
        policy = Policy(key=key, patience=patience, window=window)
        yield _candidate(problem, liveness, list_schedule(problem, policy))


def _candidate(problem: ScheduleProblem, liveness: Liveness, order: Sequence[int]) -> Candidate:
    times = (simulate(problem, order, link_factor=f).step_us for f in (1.0, SLOW_LINK))
    return Candidate(order=tuple(order), peak_bytes=liveness.peak_bytes(order), score_us=sum(times))


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the first of the fastest if it ties with them, else the one of the smallest peak."""
    best = min(candidates, key=lambda c: c.score_us)
    fast = [c for c in candidates if _ties(c, best)]
    return fast[0] if fast[0] is candidates[0] else min(fast, key=lambda c: c.peak_bytes)


def _ties(candidate: Candidate, best: Candidate) -> bool:
    return candidate.score_us <= best.score_us * (1.0 + TIE)
