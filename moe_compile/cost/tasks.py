"""Tasks of one layer on one rank, and their run on its streams.

Contract
    A task needs tasks of lower index only. Streams never interrupt a task; an idle stream takes
    the ready task that its priority puts first. Compute and collectives slow each other by the
    shares that the link's profile states, as in `cost/events.py`.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from moe_compile.cost.events import RunningTask, set_rates

COMPUTE: Final = "compute"
LINK: Final = "communication"
NODE_LINK: Final = "inside the node"
"""Stream of collectives inside a node that run beside those between nodes."""
STREAMS: Final = (COMPUTE, LINK, NODE_LINK)
"""Streams of one rank."""


def compute_stream(rank: int) -> str:
    """Return the name of one rank's compute stream, where there are several ranks."""
    return f"{COMPUTE} {rank}"


def _computes(stream: str) -> bool:
    return stream.startswith(COMPUTE)


class Priority(enum.Enum):
    """The rule by which an idle stream takes a ready task."""

    LONGEST_PATH = "the longest path behind it"
    NEXT_COLLECTIVE = "what the earliest collective needs, then the longest path behind it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One kernel, or one collective."""

    name: str
    stream: str
    us: float
    """Time the task takes alone."""
    needs: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The run of one task."""

    name: str
    stream: str
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskTimeline:
    """Spans of all tasks, in order of start."""

    spans: tuple[Span, ...]

    @property
    def total_us(self) -> float:
        """Return the end of the last task."""
        return max((span.end_us for span in self.spans), default=0.0)

    def busy_us(self, stream: str) -> float:
        """Return how long `stream` had a task."""
        return sum(span.end_us - span.start_us for span in self.spans if span.stream == stream)

    @property
    def exposed_us(self) -> float:
        """Return the time in which collectives ran and nothing was computed.

        Idle streams do not occur together: a task that is ready runs.
        """
        return self.total_us - self.busy_us(COMPUTE)


@dataclass(slots=True)
class TaskList:
    """Tasks under construction."""

    tasks: list[Task] = field(default_factory=list)

    def add(self, name: str, us: float, needs: Sequence[int] = (), stream: str = COMPUTE) -> int:
        """Add a task; return its index."""
        self.tasks.append(Task(name=name, stream=stream, us=us, needs=tuple(needs)))
        return len(self.tasks) - 1


def run_in_order(tasks: Sequence[Task]) -> TaskTimeline:
    """Run one task after another: nothing overlaps."""
    now, spans = 0.0, []
    for task in tasks:
        spans.append(_span(task, now, now + task.us))
        now += task.us
    return TaskTimeline(spans=tuple(spans))


def run_tasks(
    tasks: Sequence[Task],
    contention: float,
    overlap_slowdown: float,
    priority: Priority = Priority.LONGEST_PATH,
    *,
    node_slowdown: float = 0.0,
) -> TaskTimeline:
    """Run tasks as their needs allow; compute and collectives slow each other by these shares.

    `node_slowdown` is the overlap slowdown of collectives inside the node, where they have a
    stream of their own.
    """
    slowdowns = {LINK: overlap_slowdown, NODE_LINK: node_slowdown}
    return _Run(tasks, contention, slowdowns, priority).timeline()


class _Run:
    """One simulation, under way. Prices need thousands of them: no stream has a queue to scan."""

    def __init__(
        self,
        tasks: Sequence[Task],
        contention: float,
        overlap_slowdown: Mapping[str, float],
        priority: Priority,
    ) -> None:
        self.tasks = tasks
        self.streams = tuple(dict.fromkeys([*STREAMS, *(task.stream for task in tasks)]))
        computes = frozenset(filter(_computes, self.streams))
        self.rules = computes, contention, overlap_slowdown
        self.missing = [len(task.needs) for task in tasks]
        self.after: list[list[int]] = [[] for _ in tasks]
        for index, task in enumerate(tasks):
            for needed in task.needs:
                self.after[needed].append(index)
        path_us = _paths(tasks, self.after)
        urgency = [0.0] * len(tasks)
        if priority is Priority.NEXT_COLLECTIVE:
            urgency = _urgencies(tasks, self.after)
        self.keys = list(zip(urgency, (-us for us in path_us), range(len(tasks)), strict=True))
        self.ready: dict[str, list[tuple[float, float, int]]] = {
            stream: [] for stream in self.streams
        }
        self.running: dict[str, RunningTask] = {}
        self.started: dict[str, tuple[int, float]] = {}
        """Stream -> its last task and when that started."""
        self.spans: list[Span] = []

    def timeline(self) -> TaskTimeline:
        for index, count in enumerate(self.missing):
            if not count:
                self._offer(index)
        now = 0.0
        while self._start(now):
            now = self._finish()
        return TaskTimeline(spans=tuple(sorted(self.spans, key=lambda span: span.start_us)))

    def _offer(self, index: int) -> None:
        heapq.heappush(self.ready[self.tasks[index].stream], self.keys[index])

    def _start(self, now: float) -> bool:
        """Give idle streams ready tasks; return whether anything runs."""
        running, num_before = self.running, len(self.running)
        for stream, ready in self.ready.items():
            if ready and stream not in running:
                index = heapq.heappop(ready)[-1]
                running[stream] = RunningTask.from_now(now, self.tasks[index].us)
                self.started[stream] = index, now
        if len(running) > num_before:
            set_rates(running, now, *self.rules)
        return bool(running)

    def _finish(self) -> float:
        """Finish the running tasks that end first; return when they end.

        Tasks they slowed go on faster: one that seemed to end a rounding later may be over too.
        """
        running = self.running
        now = min([one.end for one in running.values()])
        over = []
        while ended := [stream for stream, one in running.items() if one.end <= now]:
            for stream in ended:
                del running[stream]
            over += ended
            set_rates(running, now, *self.rules)
        for stream in over if len(over) == 1 else sorted(over, key=self.streams.index):
            index, start = self.started[stream]
            self.spans.append(_span(self.tasks[index], start, now))
            for later in self.after[index]:
                self.missing[later] -= 1
                if not self.missing[later]:
                    self._offer(later)
        return now


def _paths(tasks: Sequence[Task], after: Sequence[Sequence[int]]) -> list[float]:
    path = [0.0] * len(tasks)
    for index in reversed(range(len(tasks))):
        path[index] = tasks[index].us + max((path[i] for i in after[index]), default=0.0)
    return path


def _urgencies(tasks: Sequence[Task], after: Sequence[Sequence[int]]) -> list[float]:
    """Return the index of the earliest collective that needs each task; inf where none does."""
    urgency = [math.inf] * len(tasks)
    for index in reversed(range(len(tasks))):
        own = math.inf if _computes(tasks[index].stream) else float(index)
        urgency[index] = min(own, *(urgency[i] for i in after[index]), math.inf)
    return urgency


def _span(task: Task, start_us: float, end_us: float) -> Span:
    return Span(name=task.name, stream=task.stream, start_us=start_us, end_us=end_us)
