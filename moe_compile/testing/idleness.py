"""How long processes have done nothing, by the CPU time they use: what tells a hang from slowness.

Contract
    Where the system does not tell a process's CPU time, nothing is taken to have been done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

SAMPLE_S: Final = 0.5
BUSY: Final = 0.1
"""Of one core between two samples; a gloo group's threads, which look for messages, use less."""


class Idleness:
    """Watches processes from now on."""

    def __init__(self, pids: Sequence[int]) -> None:
        """Watch the processes `pids` together."""
        self._pids = pids
        self._sampled = self._busy_at = time.monotonic()
        self._used_s = self._cpu_s()

    def seconds(self) -> float:
        """Return for how long all of them together have used less than a tenth of a core."""
        now = time.monotonic()
        if now - self._sampled >= SAMPLE_S:
            used_s = self._cpu_s()
            if used_s - self._used_s >= BUSY * (now - self._sampled):
                self._busy_at = now
            self._sampled, self._used_s = now, used_s
        return now - self._busy_at

    def _cpu_s(self) -> float:
        return sum(map(_cpu_s, self._pids))


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of the children that it has waited for."""
    try:
        _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
    except OSError:  # it has ended, or this is not Linux
        return 0.0
    ticks = sum(map(int, fields.split()[11:15]))  # utime, stime, cutime, cstime: proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")
