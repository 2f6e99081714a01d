"""What one section found, on disk after every finding, and the time it has left.

Contract
    The file is whole whenever the process dies: it is replaced, never written over.
    An item that raises is recorded with its traceback and the section goes on; one that no longer
    fits in the time is recorded as skipped.
    A record that resumes another holds what that found. What the other began and did not end is a
    failure, and is not begun again.
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(kw_only=True, slots=True)
class Record:
    """One section's results; `data` is what is written."""

    path: Path
    deadline: float
    """By time.monotonic()."""
    data: dict[str, Any] = field(default_factory=dict)
    resumes: bool = False
    """Whether what is on disk was found by an earlier process of the same section."""

    def __post_init__(self) -> None:
        """Start with nothing found, or with what an earlier process found."""
        self.data |= {"rows": [], "failures": [], "skipped": [], "begun": [], "ended": []}
        if self.resumes and self.path.exists():
            self.data |= json.loads(self.path.read_text())
        for what in [one for one in self.data["begun"] if one not in self.data["ended"]]:
            self.fail(what, "its processes ended, or were ended as they did nothing: see the logs")
            self.data["ended"].append(what)
        self.write()

    def left_s(self) -> float:
        """Return the seconds until this section should have ended."""
        return self.deadline - time.monotonic()

    def put(self, **found: Any) -> None:
        """Add named findings."""
        self.data |= found
        self.write()

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add one row to the section's table."""
        self.data["rows"].append(dict(row))
        self.write()

    def fail(self, what: str, why: str, details: str = "") -> None:
        """Add a failure; the section goes on."""
        self.data["failures"].append({"what": what, "why": why, "traceback": details})
        self.write()
        say(f"FAILED {what}: {why}")

    def expect(self, is_so: bool, what: str, why: str) -> bool:
        """Return `is_so`; adds a failure when it is not so."""
        if not is_so:
            self.fail(what, why)
        return is_so

    def attempt(self, what: str, work: Callable[[], Result], needs_s: float = 0.0) -> Result | None:
        """Return what `work` returns; None when it raised or `needs_s` no longer fit."""
        if not self._fits(what, needs_s):
            return None
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - a GPU breaks in ways no list of types covers,
            # and what is not tried after a failure costs another loan of the machine
            self.fail(
                what, f"{type(error).__name__}: {error}"[:500], traceback.format_exc()[-6000:]
            )
            return None

    def begin(self, what: str, *, why: str = "", needs_s: float = 0.0) -> bool:
        """Return whether `what` is to be done: it fits, no process began it, and `why` is "".

        `why` says why it cannot be. What is begun is on disk: a process may die of it.
        """
        if what in self.data["begun"]:
            return False
        if why:
            self.skip(what, why)
        if why or not self._fits(what, needs_s):
            return False
        self.data["begun"].append(what)
        self.write()
        return True

    def end(self, what: str) -> None:
        """Say that what was begun has ended, well or not."""
        self.data["ended"].append(what)
        self.write()

    def skip(self, what: str, why: str) -> None:
        """Say that an item was left out."""
        skipped = {"what": what, "why": why}
        if skipped not in self.data["skipped"]:
            self.data["skipped"].append(skipped)
            self.write()
            say(f"skipped {what}: {why}")

    def _fits(self, what: str, needs_s: float) -> bool:
        if fits := self.left_s() >= needs_s:
            return fits
        self.skip(what, f"out of time: needs {needs_s:.0f} s, {self.left_s():.0f} left")
        return False

    def write(self) -> None:
        """Replace the file."""
        write_json(self.path, self.data)


def write_json(path: Path, data: Any) -> None:
    """Replace the file at `path`; infinities and NaN become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(_finite(data), indent=1) + "\n")
    fresh.replace(path)


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def say(what: str) -> None:
    """Print one line of progress."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {what}\n")
    sys.stdout.flush()
