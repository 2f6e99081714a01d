"""Storages to keep for a given worth of a byte, by a minimum cut; and those for a budget.

Contract
    Exact for prices that add up: no other choice has a smaller sum of time and worth times bytes.
    Whole numbers all through, and the cut nearest to the backward: one solution, on every rank.

Pseudo-code
    cut(a, b) = argmin a * bytes + b * time
        a step is computed again: its time, and all that it reads is needed
        a storage is needed and its step is not computed again: its bytes
    less, more = cut for fewest bytes, cut for least time
    while a cut between the two is better than both where they tie
        it takes the place of the one on its side of the budget
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import networkx

from moe_compile.recompute.storages import Kept, Storages

FORWARD: Final = "forward", 0
BACKWARD: Final = "backward", 0


def around(storages: Storages, ns: Sequence[int], budget: int) -> tuple[Kept, Kept]:
    """Return the last solution of at most `budget` bytes and the first above, as bytes grow worth.

    `ns` are the prices of the steps. Both are the same where no budget lies between: it allows the
    fastest of all, or not even the one that keeps least.
    """
    least = _cut(storages, ns, by_bytes=sum(ns) + 1, by_time=1)
    if least.nbytes > budget:
        return least, least
    fastest = _cut(storages, ns, by_bytes=1, by_time=sum(storages.nbytes) + 1)
    if fastest.nbytes <= budget:
        return fastest, fastest
    less, more = least, fastest
    while True:
        worth, price = less.again_ns - more.again_ns, more.nbytes - less.nbytes
        between = _cut(storages, ns, by_bytes=worth, by_time=price)
        if _sum(between, worth, price) >= _sum(less, worth, price):
            return less, more
        less, more = (between, more) if between.nbytes <= budget else (less, between)


def _sum(kept: Kept, by_bytes: int, by_time: int) -> int:
    return by_bytes * kept.nbytes + by_time * kept.again_ns


def _cut(storages: Storages, ns: Sequence[int], *, by_bytes: int, by_time: int) -> Kept:
    flow = networkx.DiGraph()
    for number, step in enumerate(storages.steps):
        again = "again", number
        if step.is_free_to_choose:
            flow.add_edge(FORWARD, again, capacity=by_time * ns[number])
        elif not step.is_forced:
            flow.add_edge(FORWARD, again)
        flow.add_edges_from((("needed", storage), again) for storage in step.reads)
        for storage in step.makes:
            kept = {} if step.is_forced else {"capacity": by_bytes * storages.nbytes[storage]}
            flow.add_edge(again, ("needed", storage), **kept)
    flow.add_nodes_from([FORWARD, BACKWARD])
    flow.add_edges_from((("needed", storage), BACKWARD) for storage in storages.needed)
    _, (_, behind) = networkx.minimum_cut(flow, FORWARD, BACKWARD)
    run_again = {number for kind, number in behind if kind == "again"}
    return storages.kept(storages.not_made_by(run_again), ns)
