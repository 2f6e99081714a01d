"""Streams that serve one task at a time: the core of every simulation in virtual time.

Contract
    A stream serves tasks in the order given and never interrupts one.
    Compute and collectives slow each other, and nothing else does: while any collective runs,
    compute runs at 1 / (1 + contention) of its rate; while compute runs, a collective runs at
    1 / (1 + the overlap slowdown of its stream). Collectives of several streams do not slow
    each other.
    A task's end follows from the tasks given so far: those given later may move it,
    never to an earlier time. With neither slowdown an end is start plus work, exactly.

Pseudo-code
    event = a task starts or ends; between two events every rate is constant
    rate  = 1 alone, 1 / (1 + slowdown) beside a task of the other kind
    start = max(task is given, stream is free)
    end   = when the rates since the start sum up to the task's work
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Served:
    """One task that a stream serves, or served."""

    work: float
    """Time the task takes alone."""
    end: float = math.inf
    """inf until no later task can move it; `Streams.end_of` knows it as it stands."""
    start: float = math.inf
    """inf while it is queued; known once `Streams.end_of` has been asked."""


class Streams:
    """Busy times of streams, in any one unit, from 0."""

    def __init__(
        self,
        compute: str = "",
        contention: float = 0.0,
        overlap_slowdown: Mapping[str, float] | None = None,
    ) -> None:
        """Set the slowdowns: `compute` slows by one share, each other stream by its own."""
        slowdowns = dict(overlap_slowdown or {})
        self._is_free = not contention and not any(slowdowns.values())
        """Whether nothing slows anything."""
        self._free_at: dict[str, float] = {}
        self._state = _State(frozenset([compute]), contention, slowdowns)

    def serve(self, stream: str, ready: float, work: float) -> Served:
        """Give `stream` a task that may start at `ready`; see `end_of`.

        With a slowdown, `ready` is not before that of any task given so far.
        """
        if self._is_free:
            start = max(ready, self._free_at.get(stream, 0.0))
            self._free_at[stream] = start + work
            return Served(work, start + work, start)
        self._settle(ready)
        task = Served(work)
        self._state.give(stream, task)
        return task

    def end_of(self, task: Served) -> float:
        """Return when `task` is over if no more tasks are given."""
        if task.end < math.inf:
            return task.end
        state = self._state
        if state.first()[0] is not task:
            state = state.copy()
            while state.first()[0] is not task:
                state.step()
        return state.first()[1]

    def idle_at(self) -> float:
        """Return when all tasks given so far are over."""
        if self._is_free:
            return max(self._free_at.values(), default=0.0)
        state = self._state.copy()
        while state.running:
            state.step()
        return state.now

    def _settle(self, now: float) -> None:
        """Run up to `now`: no later task can move an end before it."""
        state = self._state
        while state.running:
            task, end = state.first()
            if end > now:
                break
            task.end = end
            state.step()
        state.now = max(state.now, now)


@dataclass(slots=True)
class RunningTask:
    """A task that runs, at one rate since the last event that changed it."""

    since: float
    left: float
    """Work at `since`."""
    stretch: float
    """Time for one unit of work: 1 over the rate."""
    end: float
    """End of the task at this rate."""

    @classmethod
    def from_now(cls, now: float, work: float) -> RunningTask:
        """Return a task of so much work that starts `now`, alone."""
        return cls(now, work, 1.0, now + work)

    def change(self, now: float, stretch: float) -> None:
        """Go on from `now` at another rate."""
        self.left = max(0.0, self.left - (now - self.since) / self.stretch)
        self.since, self.stretch = now, stretch
        self.end = now + self.left * stretch


def set_rates(
    running: Mapping[str, RunningTask],
    now: float,
    compute: frozenset[str],
    contention: float,
    overlap_slowdown: Mapping[str, float],
) -> None:
    """Let running tasks, by stream, go on from `now` as fast as they run beside the others.

    Streams of `compute` do not slow each other: they are of several ranks.
    """
    computes, sends = not compute.isdisjoint(running), not running.keys() <= compute
    for stream, one in running.items():
        slowdown = 0.0
        if stream in compute:
            slowdown = contention if sends else 0.0
        elif computes:
            slowdown = overlap_slowdown.get(stream, 0.0)
        if one.stretch != 1.0 + slowdown:
            one.change(now, 1.0 + slowdown)


@dataclass(slots=True)
class _State:
    """Tasks that run at `now`, tasks queued behind them, and how they slow each other."""

    compute: frozenset[str]
    contention: float
    overlap_slowdown: Mapping[str, float]
    now: float = 0.0
    running: dict[str, RunningTask] = field(default_factory=dict)
    tasks: dict[str, Served] = field(default_factory=dict)
    """The running task of each stream."""
    queued: dict[str, list[Served]] = field(default_factory=dict)

    def copy(self) -> _State:
        running = {
            s: RunningTask(r.since, r.left, r.stretch, r.end) for s, r in self.running.items()
        }
        queued = {stream: list(tasks) for stream, tasks in self.queued.items() if tasks}
        rules = self.compute, self.contention, self.overlap_slowdown
        return _State(*rules, self.now, running, dict(self.tasks), queued)

    def give(self, stream: str, task: Served) -> None:
        if stream in self.running:
            self.queued.setdefault(stream, []).append(task)
        else:
            self._start(stream, task)
            self._set_rates()

    def first(self) -> tuple[Served, float]:
        """Return the running task that ends first, and its end."""
        stream = self._first()
        return self.tasks[stream], self.running[stream].end

    def step(self) -> None:
        """Go on to the next end: the task queued behind starts."""
        stream = self._first()
        self.now = max(self.now, self.running.pop(stream).end)
        if queued := self.queued.get(stream):
            self._start(stream, queued.pop(0))
        self._set_rates()

    def _first(self) -> str:
        return min(self.running, key=lambda stream: self.running[stream].end)

    def _start(self, stream: str, task: Served) -> None:
        task.start = self.now
        self.running[stream], self.tasks[stream] = RunningTask.from_now(self.now, task.work), task

    def _set_rates(self) -> None:
        rules = self.compute, self.contention, self.overlap_slowdown
        set_rates(self.running, self.now, *rules)
