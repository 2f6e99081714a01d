"""An order that holds little: of the nodes that may run, the one that adds least to live bytes.

Contract
    Keeps every precedence and the order of launches of the problem. Greedy: it may hold more than
    the graph's own order at one point or another, so its peak is to be looked at.
    Near-linear: a node enters the heap once, and once more when others have freed what it reads.

What stays alive to the end, a weight's gradient say, so comes last, after all that others free.
"""

from __future__ import annotations

import heapq

from moe_compile.schedule.liveness import Liveness
from moe_compile.schedule.schedule_problem import ScheduleProblem


def lean_order(problem: ScheduleProblem, liveness: Liveness) -> list[int]:
    """Return the nodes, each the one that adds least, the first in the graph of several."""
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
    """How much more lives once a node has run, given those that have."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._bytes = {s: nbytes for made in liveness.allocates for s, nbytes in made}
        self._users: dict[int, set[int]] = {}
        for node, storages in enumerate(liveness.uses):
            for storage in storages:
                self._users.setdefault(storage, set()).add(node)

    def by(self, node: int) -> int:
        """Return the bytes that `node` makes over those that it is the last to use; at least 0."""
        made = sum(nbytes for _, nbytes in self._liveness.allocates[node])
        last = (s for s in self._liveness.uses[node] if self._users[s] == {node})
        return max(0, made - sum(self._bytes.get(storage, 0) for storage in last))

    def run(self, node: int) -> list[int]:
        """Note that `node` has run; return the nodes that are the last now to use something."""
        for storage in self._liveness.uses[node]:
            self._users[storage].discard(node)
        users = (self._users[storage] for storage in self._liveness.uses[node])
        return [next(iter(left)) for left in users if len(left) == 1]
