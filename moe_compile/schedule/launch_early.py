"""Launch each collective as soon as what it sends is there, all else in the order it was.

Contract
    Keeps every precedence and the order of launches of the problem.
    A launch stands right behind the last node that computes what it needs, or behind the launch
    before it. Followers that it needs move with it; no other node changes places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_compile.schedule.schedule_problem import ScheduleProblem


def launch_early(problem: ScheduleProblem, order: Sequence[int]) -> tuple[int, ...]:
    """Return `order` with its launches as early as they may stand."""
    behind: dict[int, list[int]] = {}
    for launch, position in _earliest(problem, order):
        behind.setdefault(position, []).append(launch)
    placed: dict[int, None] = {}  # in order
    for position, node in enumerate(order):
        if node not in problem.group_of:
            placed[node] = None
        for launch in behind.get(position, ()):
            placed.update(dict.fromkeys(_missing(problem, launch, placed)))
    return tuple(placed)


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
