"""Run a check's sections one after the other, each in its part of the time; keep the findings.

Contract
    A section that passed before on the same machine and code is not run again. The summary is on
    disk after every section. A section that measured nothing has not passed.
    The file of a section is whole whenever the process dies: it is replaced after every finding.
    An item that raises is recorded with its traceback and the section goes on; one that no longer
    fits in the time is recorded as skipped.
    A record that resumes another holds its findings. An item that the other began and did not end
    is a failure, and is not begun again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

Result = TypeVar("Result")


@dataclass(kw_only=True, slots=True)
class Record:
    """One section's results; `data` is the content of its file."""

    path: Path
    deadline: float
    """Time of its end, by time.monotonic()."""
    data: dict[str, Any] = field(default_factory=dict)
    resumes: bool = False
    """Whether the findings on disk are those of an earlier process of the same section."""

    def __post_init__(self) -> None:
        """Start without findings, or with those of an earlier process."""
        self.data |= {"rows": [], "failures": [], "skipped": [], "begun": [], "ended": []}
        if self.resumes and self.path.exists():
            self.data |= json.loads(self.path.read_text())
        for what in [one for one in self.data["begun"] if one not in self.data["ended"]]:
            self.fail(
                what, "its processes ended, or were stopped because they did nothing: see the logs"
            )
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
        """Return the result of `work`; None when it raised or `needs_s` no longer fit."""
        if not self._fits(what, needs_s):
            return None
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - a GPU breaks in ways no list of types covers,
            # and an item not tried after a failure costs another loan of the machine
            self.fail(
                what, f"{type(error).__name__}: {error}"[:500], traceback.format_exc()[-6000:]
            )
            return None

    def begin(self, what: str, *, why: str = "", needs_s: float = 0.0) -> bool:
        """Return whether `what` is to be done: it fits, no process began it, and `why` is "".

        `why` says why it cannot be done. An item begun is on disk: a process may die of it.
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
        """Note that an item begun has ended, well or not."""
        self.data["ended"].append(what)
        self.write()

    def skip(self, what: str, why: str) -> None:
        """Note that an item was left out."""
        skipped = {"what": what, "why": why}
        if skipped not in self.data["skipped"]:
            self.data["skipped"].append(skipped)
            self.write()
            say(f"skipped {what}: {why}")

    def _fits(self, what: str, needs_s: float) -> bool:
        if fits := self.left_s() >= needs_s:
            return fits
        self.skip(
            what, f"out of time: it needs {needs_s:.0f} s, and {self.left_s():.0f} s are left"
        )
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


SUMMARY: Final = "summary.json"
PASSED: Final = "passed"
ALIKE: Final = ("gpu", "torch", "cuda", "triton")
"""Properties of a machine; sections that passed with another value of one do not count."""
GRACE_S: Final = 8.0
"""Seconds before its end in which a section begins nothing more; then it is killed."""
RESERVE_S: Final = 10.0
"""Seconds for starting and for the table."""
LONGEST_S: Final = 480.0
"""Most seconds for a section, however much time is left."""


def read_arguments(
    parser: argparse.ArgumentParser,
    promised: Mapping[str, float],
    devices: Sequence[str],
    *,
    budget_s: float,
) -> argparse.Namespace:
    """Return the command line of a check that has the sections `promised`, "cuda" its device.

    The arguments of every check join those of `parser`.
    """
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--budget-s", type=float, default=budget_s, help="default: %(default)s")
    parser.add_argument(
        "--again",
        action="store_true",
        help="also run sections that passed before, by the results in FOLDER",
    )
    parser.add_argument("--device", choices=devices, default="cuda")
    known = ",".join(promised)
    parser.add_argument(
        "--sections", type=lambda text: text.split(","), default=[*promised], help=f"of {known}"
    )
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.sections} - promised.keys()):
        parser.error(f"there is no section {', '.join(unknown)}; choose from {known}")
    return arguments


def run_sections(
    out: Path,
    summary: dict[str, Any],
    promised: Mapping[str, float],
    budget_s: float,
    run: Callable[[str, float], dict[str, Any]],
    longest_s: float = LONGEST_S,
) -> bool:
    """Run those of `promised`, seconds by name, that have not passed; return whether all have.

    No section is given more than `longest_s`. `run` is given a name and seconds, and returns the
    section's result.
    """
    began = time.monotonic()
    names = [name for name in promised if name not in summary["sections"]]
    for name in names:
        (out / f"{name}.json").unlink(missing_ok=True)
    open_s = sum(promised[name] for name in names)
    for name in names:
        left_s = budget_s - RESERVE_S - (time.monotonic() - began)
        section_s = min(longest_s, left_s * promised[name] / open_s)
        open_s -= promised[name]
        out_of_time = {"status": "skipped", "why": "out of time"}
        found = run(name, section_s) if section_s > GRACE_S else out_of_time
        summary["sections"][name] = found
        summary["seconds"] = round(time.monotonic() - began, 1)
        write_json(out / SUMMARY, summary)
    return all(found["status"] == PASSED for found in summary["sections"].values())


def passed_before(
    out: Path, summary: Mapping[str, Any], alike: Sequence[str] = ("device", "sources")
) -> dict[str, Any]:
    """Return the sections of an earlier run that passed, on this machine, torch and code."""
    path = out / SUMMARY
    before = json.loads(path.read_text()) if path.exists() else {}
    if any(before.get(key) != summary[key] for key in alike) or any(
        before.get("machine", {}).get(key) != summary["machine"].get(key) for key in ALIKE
    ):
        return {}
    return {name: one for name, one in before["sections"].items() if one["status"] == PASSED}


def read_section(out: Path, name: str) -> dict[str, Any]:
    """Return the results a section has written; empty when it wrote none."""
    path = out / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def ended(code: int | None, found: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the result of a section whose process ended with `code`, None for no time left."""
    return {
        "status": _status(code, found),
        "exit_code": code,
        "seconds": round(seconds, 1),
        "failures": [failure["what"] for failure in found.get("failures", [])],
        "skipped": [skipped["what"] for skipped in found.get("skipped", [])],
    }


def _status(code: int | None, found: Mapping[str, Any]) -> str:
    if code is None:
        return "out of time"
    if code:
        return "failed"
    return PASSED if found.get("rows") else "skipped"
