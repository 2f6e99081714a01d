"""Waits for collectives that measure how long they take.

Contract
    `megamoe::measured_wait(tensor, collective)` waits as `_c10d_functional::wait_tensor` does, and
    returns what that returns. It allocates no memory of the device and never waits for more.
    On a CPU the time is the thread's, by the clock. On a GPU it is the time that the current stream
    stood at the wait, between two events around it: a few microseconds where nothing was left to
    wait for. The host is not held up: events are read once the device has passed them. They are
    used again.
    Inside of a CUDA graph's capture, and while `is_on` is false, nothing is measured.
    A collective is named by `name_of`: equal graphs, as those of equal blocks, count together.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

LIBRARY: Final = torch.library.Library("megamoe", "FRAGMENT")
LIBRARY.define("measured_wait(Tensor(a) tensor, str collective) -> Tensor(a)")
MEASURED_WAIT: Final = torch.ops.megamoe.measured_wait.default
WAIT: Final = torch.ops._c10d_functional.wait_tensor.default

MOST_PENDING: Final = 1024
"""Waits whose events are unread when the next wait looks which the device has passed."""
SEPARATOR: Final = "|"


def name_of(site: str, phase: str, node: str) -> str:
    """Return the name of a collective: the site and phase of its graph, the node that launches."""
    return SEPARATOR.join((site, phase, node))


def parts_of(name: str) -> tuple[str, str, str]:
    """Return site, phase and node of a collective's name."""
    site, phase, node = name.rsplit(SEPARATOR, 2)
    return site, phase, node


@dataclass(kw_only=True, slots=True)
class Waited:
    """How long one collective was waited for."""

    seconds: float = 0.0
    runs: int = 0
    """Number of measured waits: runs of graphs that have the collective."""


class WaitTimes:
    """The measured waits of this process."""

    def __init__(self) -> None:
        """Start measuring."""
        self.clock: Callable[[], float] = time.perf_counter
        """Seconds of a clock, for waits on a CPU."""
        self.is_on = True
        """Whether waits are measured: false while compiling, say."""
        self._found: dict[str, Waited] = {}
        self._pending: deque[tuple[str, Any, Any]] = deque()
        self._free: list[Any] = []
        self._lock = threading.Lock()

    def wait(self, tensor: torch.Tensor, collective: str) -> torch.Tensor:
        """Wait for `tensor`, and keep the time."""
        if not self.is_on:
            result: torch.Tensor = WAIT(tensor)
        elif tensor.is_cuda:
            result = self._between_events(tensor, collective)
        else:
            began = self.clock()
            result = WAIT(tensor)
            self._keep(collective, self.clock() - began)
        return result

    def take(self) -> dict[str, Waited]:
        """Return the waits since the last call, by collective; on a GPU those that are over."""
        with self._lock:
            self._read_events()
            found, self._found = self._found, {}
        return found

    def _between_events(self, tensor: torch.Tensor, collective: str) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            return WAIT(tensor)
        if len(self._pending) >= MOST_PENDING:
            with self._lock:
                self._read_events()
        before, after = self._event(), self._event()
        before.record()
        result: torch.Tensor = WAIT(tensor)
        after.record()
        self._pending.append((collective, before, after))
        return result

    def _event(self) -> Any:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

    def _read_events(self) -> None:
        while self._pending and self._pending[0][2].query():
            collective, before, after = self._pending.popleft()
            self._keep(collective, before.elapsed_time(after) / 1e3)
            self._free += (before, after)

    def _keep(self, collective: str, seconds: float) -> None:
        found = self._found.get(collective)
        if found is None:
            found = self._found[collective] = Waited()
        found.seconds += seconds
        found.runs += 1


WAIT_TIMES: Final = WaitTimes()

LIBRARY.impl("measured_wait", WAIT_TIMES.wait, "CompositeExplicitAutograd")
LIBRARY.impl("measured_wait", lambda tensor, _: tensor.view_as(tensor), "Meta")
