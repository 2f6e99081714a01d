"""What time it is, for a benchmark: modelled ("virtual") time, charged time or the wall clock.

Contract
    Virtual time is the CPU time of the thread that asks, plus every wait that was modelled;
    other jobs on the machine do not move it, and a blocked thread does not either.
    Charged time is what it was told to add, plus every wait that was modelled: nothing else.
    Wall time is the machine's monotonic clock, one for all processes.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """What the emulated link asks of a clock; times are seconds."""

    name: str

    def now(self) -> float:
        """Return the time."""

    def wait_until(self, moment: float) -> None:
        """Return when it is `moment`, at once when that is past."""

    def align(self, moment: float) -> None:
        """Make it `moment`, where this clock can be set."""


class VirtualClock:
    """CPU time of one thread plus the waits it was told to make; waiting takes no real time."""

    name = "virtual"

    def __init__(self) -> None:
        """Start at zero, for the calling thread alone."""
        self._thread = threading.get_ident()
        self._offset = -time.thread_time()

    def now(self) -> float:
        """Return the time; raises RuntimeError on any other thread, whose CPU time differs."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("virtual time was asked for on a thread it does not count")
        return time.thread_time() + self._offset

    def wait_until(self, moment: float) -> None:
        """Move on to `moment`."""
        self._offset += max(0.0, moment - self.now())

    def align(self, moment: float) -> None:
        """Make it `moment`."""
        self._offset += moment - self.now()


class ChargedClock:
    """Time others say has passed, plus waits; computing takes none of it."""

    name = "charged"

    def __init__(self) -> None:
        """Start at zero."""
        self._now = 0.0

    def now(self) -> float:
        """Return the time."""
        return self._now

    def charge(self, seconds: float) -> None:
        """Let so much time pass; raises ValueError for less than none."""
        if not seconds >= 0.0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now += seconds

    def wait_until(self, moment: float) -> None:
        """Move on to `moment`."""
        self._now = max(self._now, moment)

    def align(self, moment: float) -> None:
        """Make it `moment`."""
        self._now = moment


class WallClock:
    """The machine's monotonic clock; waiting sleeps."""

    name = "wall"

    def now(self) -> float:
        """Return the time."""
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        """Sleep until `moment`."""
        if (left := moment - time.monotonic()) > 0:
            time.sleep(left)

    def align(self, moment: float) -> None:
        """Do nothing: processes share this clock already."""


CLOCKS: dict[str, type[VirtualClock] | type[WallClock]] = {
    "virtual": VirtualClock,
    "wall": WallClock,
}
