"""The least time that collectives cost in any order of a graph's nodes.

Contract
    A lower bound for `simulate` with the launches in the order of the problem: no schedule is below
    it; there may be none that reaches it.

Why it holds
    A node runs before every launch from the first that needs it on, and after every collective of
    a group up to the last that it needs. So it can run beside a collective of the group only if one
    stands between these two. While the group's link is busy the compute stream runs such nodes,
    each once, or waits for the host to launch one, or stands still.
    Compute beside a collective is slower, and so is the collective: a unit of a collective takes
    1 + s there, s the slowdown of its group, in which compute loses the share c / (1 + c), c the
    contention. So even what is hidden costs (1 + s) c / (1 + c) of its time.
    Kernels that the host launches one after another wait for it by their launches less the compute
    before each: at most by what launches take more than their own kernels, and by the longest of
    them. Each collective's launch and each read begins such a row anew.
"""

from __future__ import annotations

from bisect import bisect_right

from moe_compile.schedule.schedule_problem import ScheduleProblem


def least_exposed_us(problem: ScheduleProblem) -> float:
    """Return the most, over groups, that collectives cost if all that can run beside some does."""
    groups = dict.fromkeys(problem.group_of.values())
    return max((_least_of_group(problem, group) for group in groups), default=0.0)


def _least_of_group(problem: ScheduleProblem, group: str) -> float:
    ranks = [r for r, n in enumerate(problem.launches) if problem.group_of[n] == group]
    last = [-1] * len(problem.nodes)
    for rank in ranks:
        last[problem.launches[rank]] = rank
    beside = []
    for node, needed in enumerate(problem.before):
        last[node] = max([last[node], *(last[before] for before in needed)])
        between = bisect_right(ranks, last[node])
        if between < len(ranks) and ranks[between] < problem.urgency[node]:
            beside.append(node)
    exchange_us = sum(problem.link_us[problem.launches[rank]] for rank in ranks)
    return _least_cost_us(problem, group, beside, exchange_us)


def _least_cost_us(
    problem: ScheduleProblem, group: str, beside: list[int], exchange_us: float
) -> float:
    """Return the least cost of the group's collectives that the nodes `beside` can hide."""
    left_us = max(0.0, exchange_us - _longest_wait_us(problem, beside))
    slowed = 1.0 + problem.overlap_slowdown.get(group, 0.0)
    slower = 1.0 + problem.contention
    compute_us = sum(problem.compute_us[n] for n in beside)
    hidden_us = min(left_us, compute_us * slower / slowed)
    cost = min(1.0, slowed * problem.contention / slower)
    return left_us - hidden_us * (1.0 - cost)


def _longest_wait_us(problem: ScheduleProblem, beside: list[int]) -> float:
    """Return how long the nodes `beside` can wait for the host to launch them."""
    kernels = [n for n in beside if problem.is_kernel(n)]
    longest_us = max((problem.host_us[n] for n in kernels), default=0.0)
    rows = 1 + sum(us > 0.0 and not problem.is_kernel(n) for n, us in enumerate(problem.host_us))
    longer_us = (problem.host_us[n] - problem.compute_us[n] for n in kernels)
    return rows * longest_us + sum(us for us in longer_us if us > 0.0)
