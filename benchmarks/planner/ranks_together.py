"""Tasks of several ranks whose collectives are one: how long all take.

Contract
    All ranks have the same tasks and run them in one order, as compiled code does: the order of
    the better timeline of even ranks, which is what a scheduler knows. A collective starts once it
    is at the front on every rank. Compute is slowed while one runs; it is slowed while any rank
    computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moe_compile.cost.rates import Rates
from moe_compile.cost.tasks import COMPUTE, Task
from moe_compile.plan.region_tasks import fastest


def order_of(tasks: Sequence[Task], rates: Rates) -> list[int]:
    """Return the order in which a rank starts `tasks`."""
    named = [replace(task, name=str(index)) for index, task in enumerate(tasks)]
    return [int(span.name) for span in fastest(named, rates).spans]


def together_us(ranks: Sequence[Sequence[Task]], order: Sequence[int], rates: Rates) -> float:
    """Return when the last task of the last rank is over."""
    return _Together(ranks, order, rates).run()


@dataclass(slots=True)
class _Stream:
    """One stream of one rank, or the link of all."""

    queue: list[int]
    at: int = 0
    left: float = 0.0
    """Work of the running task; 0 where none runs."""
    is_busy: bool = False


@dataclass(slots=True)
class _Together:
    ranks: Sequence[Sequence[Task]]
    order: Sequence[int]
    rates: Rates
    done: list[set[int]] = field(default_factory=list)
    streams: list[_Stream] = field(default_factory=list)
    link: _Stream = field(default_factory=lambda: _Stream([]))

    def run(self) -> float:
        first = self.ranks[0]
        self.done = [set() for _ in self.ranks]
        computed = [i for i in self.order if first[i].stream == COMPUTE]
        self.streams = [_Stream(computed) for _ in self.ranks]
        self.link = _Stream([i for i in self.order if first[i].stream != COMPUTE])
        now = 0.0
        while self._start():
            now += self._step()
        return now

    def _start(self) -> bool:
        """Start what is at the front and has what it needs; return whether anything runs."""
        link = self.link
        if not link.is_busy and link.at < len(link.queue):
            index = link.queue[link.at]
            if all(self._is_ready(rank, index) for rank in range(len(self.ranks))):
                link.is_busy, link.left = True, max(tasks[index].us for tasks in self.ranks)
        for rank, stream in enumerate(self.streams):
            if not stream.is_busy and stream.at < len(stream.queue):
                index = stream.queue[stream.at]
                if self._is_ready(rank, index):
                    stream.is_busy, stream.left = True, self.ranks[rank][index].us
        return link.is_busy or any(stream.is_busy for stream in self.streams)

    def _is_ready(self, rank: int, index: int) -> bool:
        return all(needed in self.done[rank] for needed in self.ranks[rank][index].needs)

    def _step(self) -> float:
        """Run to the next end; return how long that takes."""
        computes = any(stream.is_busy for stream in self.streams)
        slower = 1.0 + (self.rates.contention if self.link.is_busy else 0.0)
        link_slower = 1.0 + (self.rates.overlap_slowdown if computes else 0.0)
        ways = [(self.link, link_slower), *((stream, slower) for stream in self.streams)]
        took = min((s.left * by for s, by in ways if s.is_busy), default=math.inf)
        for stream, by in ways:
            if stream.is_busy:
                stream.left -= took / by
        for rank, stream in enumerate(self.streams):
            self._finish(stream, [self.done[rank]])
        self._finish(self.link, self.done)
        return took

    def _finish(self, stream: _Stream, done: Sequence[set[int]]) -> None:
        if stream.is_busy and stream.left <= 1e-9:
            for ended in done:
                ended.add(stream.queue[stream.at])
            stream.at, stream.is_busy, stream.left = stream.at + 1, False, 0.0
