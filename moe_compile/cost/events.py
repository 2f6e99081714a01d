"""Streams that serve one task at a time: the core of every simulation in virtual time.

Contract
    A stream serves tasks in the order given and never interrupts one.
    With contention, tasks of one stream run slower while any other stream is busy; a task's end
    moves when another stream gets work under it. Without, an end is start plus work, exactly.

Pseudo-code
    start = max(task is ready, stream is free)
    end   = start + work, and (slowed stream) + slowdown * the time others are busy meanwhile
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Served:
    """One task that a stream serves, or served."""

    start: float
    work: float
    """Time it takes alone."""
    end: float


class Streams:
    """When each stream is busy; times in any one unit, from 0."""

    def __init__(self, slowed: str = "", slowdown: float = 0.0) -> None:
        """Slow the stream `slowed` by the factor 1 + `slowdown` while any other is busy."""
        self.slowed = slowed
        self.slowdown = slowdown
        self._last: dict[str, Served] = {}
        self._busy: list[tuple[float, float]] = []
        """Where the others are busy from the slowed stream's last task on, by start."""

    def free_at(self, stream: str) -> float:
        """Return when `stream` has served all it was given so far."""
        last = self._last.get(stream)
        return last.end if last else 0.0

    def serve(self, stream: str, ready: float, work: float) -> Served:
        """Give `stream` a task that may start at `ready`; its end may move until time is there.

        With contention `ready` is not before the start of what the slowed stream serves now.
        """
        start = max(ready, self.free_at(stream))
        served = Served(start, work, start + work)
        self._last[stream] = served
        if not self.slowdown:
            return served
        if stream == self.slowed:
            self._busy = [span for span in self._busy if span[1] > start]
        else:
            self._busy.append((served.start, served.end))
            self._busy.sort()
        if (running := self._last.get(self.slowed)) is not None:
            running.end = self._slowed_end(running)
        return served

    def _slowed_end(self, task: Served) -> float:
        """Return the end of a task that runs at 1 / (1 + slowdown) where others are busy."""
        now, left = task.start, task.work
        for start, end in self._busy:
            if start > now:
                alone = min(left, start - now)
                now, left = now + alone, left - alone
            if left <= 0.0 or end <= now:
                continue
            done = min(left, (end - now) / (1.0 + self.slowdown))
            now, left = now + done * (1.0 + self.slowdown), left - done
        return now + left
