"""The least time of collectives that any order of a graph's nodes leaves exposed.

Contract
    A lower bound for `simulate` with the launches in the order of the problem: no schedule is below
    it; there may be none that reaches it.

Why it holds
    A node runs before every launch from the first that needs it on, and after every collective of
    a group up to the last that it needs. So it can run beside a collective of the group only if one
    stands between these two. While the group's link is busy the compute stream runs such nodes,
    each once, or stands still.
"""

from __future__ import annotations

from bisect import bisect_right

from moe_compile.schedule.schedule_problem import ScheduleProblem


def least_exposed_us(problem: ScheduleProblem) -> float:
    """Return the time of a group's collectives less all compute that could hide some; the most."""
    groups = dict.fromkeys(problem.group_of.values())
    return max((_least_of_group(problem, group) for group in groups), default=0.0)


def _least_of_group(problem: ScheduleProblem, group: str) -> float:
    ranks = [r for r, n in enumerate(problem.launches) if problem.group_of[n] == group]
    last = [-1] * len(problem.nodes)
    for rank in ranks:
        last[problem.launches[rank]] = rank
    left_us = sum(problem.link_us[problem.launches[rank]] for rank in ranks)
    for node, needed in enumerate(problem.before):
        last[node] = max([last[node], *(last[before] for before in needed)])
        between = bisect_right(ranks, last[node])
        if between < len(ranks) and ranks[between] < problem.urgency[node]:
            left_us -= problem.compute_us[node]
    return max(0.0, left_us)
