"""Hidden and exposed communication, measured in the traces torchtitan's profiler writes.

Contract
    A trace is read once, in a process of its own: traces are large, and training does not wait.
    Times are unions of intervals on this rank's GPU: several kernels at once count once.

Exposed is what some NCCL kernel takes while no other kernel runs; hidden is the rest of it. A trace
without GPU kernels measures nothing; torchtitan's profiler does not start without a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

Interval = tuple[float, float]

COMMUNICATION: Final = "nccl"
"""How the names of NCCL's kernels begin."""


class ProfileWindow:
    """The newest measurement of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Look for this rank's traces below `folder`, one folder per profiled iteration."""
        self._folder = folder
        self._name = f"rank{rank}_trace.json"
        self._seen: set[Path] = set(folder.glob(f"*/{self._name}"))
        self._reader: subprocess.Popen[str] | None = None
        self._latest: dict[str, float] = {}

    def poll(self) -> dict[str, float]:
        """Return the newest measurement, {} before there is one; never waits."""
        if self._reader is not None and self._reader.poll() is not None:
            printed, _ = self._reader.communicate()
            if self._reader.returncode == 0:
                self._latest = json.loads(printed)
            self._reader = None
        fresh = sorted(set(self._folder.glob(f"*/{self._name}")) - self._seen)
        if fresh and self._reader is None:
            self._seen |= set(fresh)
            command = [sys.executable, "-m", "torchtitan_integration.profile_window", fresh[-1]]
            self._reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return self._latest

    def close(self) -> None:
        """End a reader that still runs."""
        if self._reader is not None:
            self._reader.kill()
            self._reader.wait()


def measure_trace(path: Path) -> dict[str, float]:
    """Return `hidden_ms` and `exposed_ms` of a chrome trace; {} where no GPU kernel is in it."""
    events = json.loads(path.read_text())["traceEvents"]
    kernels = [e for e in events if e.get("ph") == "X" and e.get("cat") == "kernel"]
    if not kernels:
        return {}
    communication = list(union(_intervals(k for k in kernels if _communicates(k))))
    compute = list(union(_intervals(k for k in kernels if not _communicates(k))))
    total, hidden = _length(communication), _length(common(communication, compute))
    return {"hidden_ms": hidden / 1e3, "exposed_ms": (total - hidden) / 1e3}


def _communicates(kernel: dict[str, Any]) -> bool:
    return str(kernel.get("name", "")).startswith(COMMUNICATION)


def _intervals(kernels: Iterable[dict[str, Any]]) -> Iterator[Interval]:
    """Yield (begin, end) in microseconds."""
    for kernel in kernels:
        begin = float(kernel["ts"])
        yield begin, begin + float(kernel["dur"])


def union(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Yield disjoint intervals, ascending, that cover the same points."""
    current: Interval | None = None
    for begin, end in sorted(intervals):
        if current is None or begin > current[1]:
            if current is not None:
                yield current
            current = (begin, end)
        else:
            current = (current[0], max(current[1], end))
    if current is not None:
        yield current


def common(first: list[Interval], second: list[Interval]) -> Iterator[Interval]:
    """Yield where two lists of disjoint ascending intervals overlap."""
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            yield begin, end
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


if __name__ == "__main__":
    print(json.dumps(measure_trace(Path(sys.argv[1]))))
