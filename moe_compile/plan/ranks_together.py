"""Tasks of several ranks whose collectives are one: how long all take.

Contract
    All ranks have the same tasks and run them in one order, as compiled code does: the order of
    the better timeline of even ranks, which is what a scheduler knows. A collective starts once it
    is at the front on every rank. Compute is slowed while one runs; it is slowed while any rank
    computes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from moe_compile.cost.rates import Rates
from moe_compile.cost.tasks import COMPUTE, Task
from moe_compile.plan.region_tasks import fastest

ENOUGH: Final = 1e-9
"""Work left, in microseconds, of a task that is over."""


def order_of(tasks: Sequence[Task], rates: Rates) -> list[int]:
    """Return the order in which a rank starts `tasks`."""
    named = [replace(task, name=str(index)) for index, task in enumerate(tasks)]
    return [int(span.name) for span in fastest(named, rates).spans]


def together_us(ranks: Sequence[Sequence[Task]], order: Sequence[int], rates: Rates) -> float:
    """Return when the last task of the last rank is over."""
    return _Together(ranks, order, rates).run()


@dataclass(slots=True)
class _Together:
    ranks: Sequence[Sequence[Task]]
    order: Sequence[int]
    rates: Rates
    computed: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    """Tasks of either stream, in the order in which they start."""
    done: list[set[int]] = field(default_factory=list)
    """Of each rank."""
    place: list[int] = field(default_factory=list)
    """Of each rank in `computed`."""
    idle: set[int] = field(default_factory=set)
    """Ranks that compute nothing."""
    served: float = 0.0
    """Work that a compute stream would have done that was never idle: all are slowed alike."""
    ends: list[tuple[float, int]] = field(default_factory=list)
    """What `served` is when a rank's running task is over, and the rank; a heap."""
    on_link: float | None = None
    """Work left of the running collective."""
    place_on_link: int = 0

    def run(self) -> float:
        first = self.ranks[0]
        self.computed = [i for i in self.order if first[i].stream == COMPUTE]
        self.sent = [i for i in self.order if first[i].stream != COMPUTE]
        self.done = [set() for _ in self.ranks]
        self.place = [0] * len(self.ranks)
        self.idle = set(range(len(self.ranks)))
        now = 0.0
        while self._start():
            now += self._step()
        return now

    def _start(self) -> bool:
        """Start what is at the front and has what it needs; return whether anything runs."""
        if self.on_link is None and self.place_on_link < len(self.sent):
            index = self.sent[self.place_on_link]
            if all(map(self._is_ready, range(len(self.ranks)), itertools.repeat(index))):
                self.on_link = max(tasks[index].us for tasks in self.ranks)
        for rank in sorted(self.idle):
            place = self.place[rank]
            if place < len(self.computed) and self._is_ready(rank, self.computed[place]):
                us = self.ranks[rank][self.computed[place]].us
                heapq.heappush(self.ends, (self.served + us, rank))
                self.idle.remove(rank)
        return self.on_link is not None or bool(self.ends)

    def _is_ready(self, rank: int, index: int) -> bool:
        return self.done[rank].issuperset(self.ranks[rank][index].needs)

    def _step(self) -> float:
        """Run to the next end; return how long that takes."""
        slower = 1.0 + (self.rates.contention if self.on_link is not None else 0.0)
        link_slower = 1.0 + (self.rates.overlap_slowdown if self.ends else 0.0)
        of_link = math.inf if self.on_link is None else self.on_link * link_slower
        of_compute = (self.ends[0][0] - self.served) * slower if self.ends else math.inf
        took = min(of_link, of_compute)
        self.served += took / slower
        if self.on_link is not None:
            self.on_link -= took / link_slower
        self._finish()
        return took

    def _finish(self) -> None:
        while self.ends and self.ends[0][0] - self.served <= ENOUGH:
            _, rank = heapq.heappop(self.ends)
            self.done[rank].add(self.computed[self.place[rank]])
            self.place[rank] += 1
            self.idle.add(rank)
        if self.on_link is not None and self.on_link <= ENOUGH:
            self.on_link = None
            for ended in self.done:
                ended.add(self.sent[self.place_on_link])
            self.place_on_link += 1
