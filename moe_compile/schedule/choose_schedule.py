"""The schedule to use: the fastest of several candidates that memory allows.

Contract
    Keeps every precedence and the order of launches of the problem.
    The peak of live bytes stays within the allowance over the graph as it came, unless the order
    of launches alone already breaks it; then within that of the graph's own order with that change.
    The graph as it came wins ties, then the smaller peak; of orders that differ in nothing but when
    they launch, the one with the earliest launches that memory allows.

Pseudo-code
    schedule by every policy, and within the memory if that forbids the fastest: with what is left
    run in the graph's own order, or in one that holds little, as far as that has room itself
    the fastest that memory allows, on the link assumed and a slower one
    launch as early as what is sent is there, unless that is slower or memory forbids it
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from moe_compile.schedule.launch_early import launch_early
from moe_compile.schedule.lean_order import lean_order
from moe_compile.schedule.list_schedule import (
    Policy,
    first_result,
    graph_order,
    incoming_order,
    list_schedule,
    longest_path,
    nearest_launch,
)
from moe_compile.schedule.liveness import Liveness
from moe_compile.schedule.memory_room import MemoryRoom
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import simulate

POLICIES: Final = (
    Policy(key=nearest_launch),
    Policy(key=nearest_launch, patience=0.5),
    Policy(key=nearest_launch, patience=1.0),
    Policy(key=nearest_launch, spares_host=True),
    Policy(key=graph_order),
    Policy(key=graph_order, patience=0.5),
    Policy(key=longest_path),
    Policy(key=first_result),
)
"""Priorities and patience that each won on some graph."""
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
    allowed = max(allowed, baseline.peak_bytes)
    candidates = [
        baseline,
        *(_candidate(problem, liveness, list_schedule(problem, policy)) for policy in POLICIES),
    ]
    fitting = [c for c in candidates if c.peak_bytes <= allowed]
    fastest, best = _fastest(candidates), _fastest(fitting)
    if not _ties(best, fastest):
        fitting += _scheduled_in_room(problem, liveness, baseline.order, allowed)
        best = _fastest([c for c in fitting if c.peak_bytes <= allowed])
    is_capped = not _ties(best, fastest)
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


def _scheduled_in_room(
    problem: ScheduleProblem, liveness: Liveness, known: Sequence[int], allowed_bytes: float
) -> Iterator[Candidate]:
    ways = [(known, True), (known, False)]
    lean = lean_order(problem, liveness)
    if liveness.peak_bytes(lean) > allowed_bytes:
        place = {node: i for i, node in enumerate(lean)}
        as_lean = Policy(key=lambda _, node: (float(place[node]),))
        lean = list_schedule(problem, as_lean, MemoryRoom(liveness, known, allowed_bytes))
    if liveness.peak_bytes(lean) <= allowed_bytes:
        ways.append((lean, True))
    for policy, (order, looks_ahead) in itertools.product(POLICIES, ways):
        room = MemoryRoom(liveness, order, allowed_bytes, looks_ahead=looks_ahead)
        yield _candidate(problem, liveness, list_schedule(problem, policy, room))


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
