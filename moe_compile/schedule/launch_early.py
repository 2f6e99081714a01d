"""Launch each collective as soon as what it sends is there, all else in the order it was.

Contract
    Keeps every precedence and the order of launches of the problem.
    A launch stands right behind the last node that computes what it needs, or behind the launch
    before it; later, but not behind its place in that order, where the device would otherwise stand
    still until the host has launched it. Followers that it needs move with it; no other node
    changes places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import Clock


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
    """Give each launch with the position in `order` that it may come right behind."""
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
