"""The schedule to use: the fastest of several candidates that memory allows.

Contract
    Keeps every precedence and the order of launches of the problem.
    The peak of live bytes stays within the allowance over the graph as it came, unless the order
    of launches alone already breaks it; then within that of the graph's own order with that change.
    The graph as it came wins ties, then the smaller peak. Of orders that differ only in the places
    of launches, the one with the earliest launches that memory allows wins.

Pseudo-code
    schedule by every policy, and within the memory if that forbids the fastest: run the remaining
    nodes in the graph's own order, or in a lean order, as far as that has room itself
    in each order, put copies to the host and back where they suit it
    the fastest that memory allows, on the link assumed and a slower one
    launch as early as the sent values are ready, unless that is slower or memory forbids it

`launch_early` moves each collective to where its input is ready; other nodes keep their order.
It keeps every precedence and the order of launches of the problem.
A launch stands right behind the last node that computes its input, or behind the launch before
it. It stands later, but not behind its place in that order, where the device would otherwise idle
until the host has launched it. Followers that it needs move with it; no other node changes places.

`lean_order` takes, of the nodes that may run, the one that adds least to live bytes.
It keeps every precedence and the order of launches of the problem. It is greedy: it may hold more
than the graph's own order at one point or another, so its peak has to be checked.
Near-linear: a node enters the heap once, and once more when others have freed its inputs.

A node whose result lives to the end, a weight's gradient say, so comes last, after all nodes that
free memory.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from moe_compile.schedule.list_schedule import (
    Policy,
    first_result,
    graph_order,
    incoming_order,
    list_schedule,
    longest_path,
    nearest_launch,
)
from moe_compile.schedule.liveness import Liveness, MemoryHeadroom
from moe_compile.schedule.place_copies import SLOW_LINK, place_copies
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import Clock, simulate

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
"""Policies, by priority and patience, that each won on some graph."""
TIE: Final = 0.002
"""Share of the step below which two schedules count as equally fast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateOrder:
    """One order, its peak memory and its time."""

    order: tuple[int, ...]
    peak_bytes: int
    score_us: float
    """Sum of the step's times on the link assumed and on the slow one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenOrder:
    """The schedule to use, and the graph's own order to compare with."""

    chosen: CandidateOrder
    as_it_came: CandidateOrder
    is_capped: bool
    """Whether memory forbade a faster schedule."""
    fastest: CandidateOrder
    """The fastest of all, whatever it holds."""


def choose_schedule(
    problem: ScheduleProblem,
    liveness: Liveness,
    max_memory_increase: float,
    step_peak_bytes: int = 0,
    is_chunked: bool = False,
) -> ChosenOrder:
    """Return the fastest schedule whose peak rises by at most the allowed fraction.

    The rise counts from the graph's own peak, as if it had not been chunked: chunks one after
    another hold less than all rows at once, and that saving may be spent. The fraction is of
    `step_peak_bytes`, the peak of a whole training step, where that is known and larger.
    """
    came = _candidate(problem, liveness, tuple(range(len(problem.nodes))))
    whole = came.peak_bytes
    if is_chunked:
        whole = max(whole, liveness.peak_bytes(side_by_side(problem)))
    allowed = whole + max_memory_increase * max(whole, step_peak_bytes)

    def candidate(order: Sequence[int]) -> CandidateOrder:
        return _candidate(problem, liveness, place_copies(problem, liveness, order, allowed))

    # orders are searched for as if copies took no time: they get their places afterwards
    others = replace(problem, copy_us=dict.fromkeys(problem.copy_us, 0.0))
    baseline = candidate(incoming_order(others))
    allowed = max(allowed, baseline.peak_bytes)
    candidates = [
        baseline,
        *(candidate(list_schedule(others, policy)) for policy in POLICIES),
    ]
    fitting = [c for c in candidates if c.peak_bytes <= allowed]
    fastest, best = _fastest(candidates), _fastest(fitting)
    if not _ties(best, fastest):
        fitting += map(candidate, _scheduled_in_room(others, liveness, baseline.order, allowed))
        best = _fastest([c for c in fitting if c.peak_bytes <= allowed])
    is_capped = not _ties(best, fastest)
    early = candidate(launch_early(others, best.order))
    fits = early.peak_bytes <= max(best.peak_bytes, allowed)
    chosen = early if fits and _ties(early, best) else best
    return ChosenOrder(chosen=chosen, as_it_came=came, is_capped=is_capped, fastest=fastest)


def side_by_side(problem: ScheduleProblem) -> tuple[int, ...]:
    """Return the nodes by depth: the same step of all chunks together, as if they were one."""
    depth: list[int] = []
    for node in range(len(problem.nodes)):
        depth.append(1 + max((depth[p] for p in problem.before[node]), default=-1))
    return tuple(sorted(range(len(problem.nodes)), key=depth.__getitem__))


def _scheduled_in_room(
    problem: ScheduleProblem, liveness: Liveness, known: Sequence[int], allowed_bytes: float
) -> Iterator[list[int]]:
    ways = [(known, True), (known, False)]
    lean = lean_order(problem, liveness)
    if liveness.peak_bytes(lean) > allowed_bytes:
        place = {node: i for i, node in enumerate(lean)}
        as_lean = Policy(key=lambda _, node: (float(place[node]),))
        lean = list_schedule(problem, as_lean, MemoryHeadroom(liveness, known, allowed_bytes))
    if liveness.peak_bytes(lean) <= allowed_bytes:
        ways.append((lean, True))
    for policy, (order, looks_ahead) in itertools.product(POLICIES, ways):
        room = MemoryHeadroom(liveness, order, allowed_bytes, looks_ahead=looks_ahead)
        yield list_schedule(problem, policy, room)


def _candidate(
    problem: ScheduleProblem, liveness: Liveness, order: Sequence[int]
) -> CandidateOrder:
    times = (simulate(problem, order, link_factor=f).step_us for f in (1.0, SLOW_LINK))
    return CandidateOrder(
        order=tuple(order), peak_bytes=liveness.peak_bytes(order), score_us=sum(times)
    )


def _fastest(candidates: Sequence[CandidateOrder]) -> CandidateOrder:
    """Return the first of the fastest if it ties with them, else the one of the smallest peak."""
    best = min(candidates, key=lambda c: c.score_us)
    fast = [c for c in candidates if _ties(c, best)]
    return fast[0] if fast[0] is candidates[0] else min(fast, key=lambda c: c.peak_bytes)


def _ties(candidate: CandidateOrder, best: CandidateOrder) -> bool:
    return candidate.score_us <= best.score_us * (1.0 + TIE)


def launch_early(problem: ScheduleProblem, order: Sequence[int]) -> tuple[int, ...]:
    """Return `order` with its launches as early as they may stand."""
    earliest = dict(_earliest(problem, order))
    later = [*reversed(problem.launches)]
    clock = Clock(problem)
    placed: dict[int, None] = {}  # in order
    for position, node in enumerate(order):
        if node not in problem.group_of:
            _place([node], placed, clock)
        while later and (
            later[-1] == node
            or (earliest[later[-1]] <= position and clock.host_has_time(later[-1]))
        ):
            _place(_missing(problem, later.pop(), placed), placed, clock)
    return tuple(placed)


def _place(nodes: Sequence[int], placed: dict[int, None], clock: Clock) -> None:
    for node in nodes:
        if node not in placed:
            placed[node] = None
            clock.run(node)


def _earliest(problem: ScheduleProblem, order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each launch with the position in `order` that it may come right behind."""
    there = [0] * len(order)
    """Node -> position of the last node that must run before it, or of itself: no follower."""
    position = {node: i for i, node in enumerate(order)}
    for node, needed in enumerate(problem.before):
        last = max((there[p] for p in needed), default=0)
        is_moved = problem.is_follower[node] or node in problem.group_of
        there[node] = last if is_moved else position[node]
    latest = 0
    for launch in problem.launches:
        latest = max(latest, there[launch])
        yield launch, latest


def _missing(problem: ScheduleProblem, launch: int, placed: dict[int, None]) -> list[int]:
    """Return the launch, and before it the followers that it needs and that do not stand yet."""
    missing, todo = {launch}, [launch]
    while todo:
        needed = [p for p in problem.before[todo.pop()] if p not in placed and p not in missing]
        missing.update(needed)
        todo.extend(needed)
    return sorted(missing)


def lean_order(problem: ScheduleProblem, liveness: Liveness) -> list[int]:
    """Return the nodes in lean order; of equal ones the first in the graph comes first."""
    missing, added = problem.num_missing(), _Added(liveness)
    ready = [(added.by(node), node) for node, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order: dict[int, None] = {}
    while ready:
        nbytes, node = heapq.heappop(ready)
        if node in order or nbytes > added.by(node):
            continue
        order[node] = None
        freed = added.run(node)
        for successor in problem.successors(node):
            missing[successor] -= 1
            freed += [successor] * (not missing[successor])
        for other in freed:
            if not missing[other]:
                heapq.heappush(ready, (added.by(other), other))
    return [*order]


class _Added:
    """Bytes that a node adds to the live ones, given the nodes that have run."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._bytes = {s: nbytes for made in liveness.allocates for s, nbytes in made}
        self._users: dict[int, set[int]] = {}
        for node, storages in enumerate(liveness.uses):
            for storage in storages:
                self._users.setdefault(storage, set()).add(node)

    def by(self, node: int) -> int:
        """Return the bytes `node` allocates less those that it is the last to use; at least 0."""
        made = sum(nbytes for _, nbytes in self._liveness.allocates[node])
        last = (s for s in self._liveness.uses[node] if self._users[s] == {node})
        return max(0, made - sum(self._bytes.get(storage, 0) for storage in last))

    def run(self, node: int) -> list[int]:
        """Note that `node` has run; return the nodes that are now the last to use a storage."""
        for storage in self._liveness.uses[node]:
            self._users[storage].discard(node)
        users = (self._users[storage] for storage in self._liveness.uses[node])
        return [next(iter(left)) for left in users if len(left) == 1]
