"""Coverage of fuzzing campaigns: programs by outcome, features by count, and the file of both.

Contract
    The rows of the table are the features of programs, every choice of the grammar among them.
    A run replaces an earlier one of the same seed and commit; the file is replaced whole.
"""

from __future__ import annotations

import enum
import json
import os
import platform
import sys
from collections import Counter
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

from moe_compile.hardware.measure import cpu_name
from moe_compile.report.provenance import recorded_command, revision
from moe_compile.testing.programs.choices import (
    MIXES_SEQUENCES,
    Backward,
    Groups,
    Heads,
    Poison,
    Routing,
    Running,
    Sharing,
    Within,
    Wrapping,
)
from moe_compile.testing.programs.grammar import (
    CHOICES_OF_CAPACITY,
    CHOICES_OF_EXPERTS,
    READ_IN,
    Experts,
    Layer,
    Program,
    Rewrite,
    ends_smaller,
)
from moe_compile.testing.programs.judge import FAILURES, Outcome


def features(program: Program) -> frozenset[str]:
    """Return the names of the features of `program`, as the coverage table shows them."""
    found = {f"tokens: {name}" for name in _token_features(program.tokens)}
    found |= {f"width: {program.width}", f"dtype: {program.dtype}"}
    found |= {"dynamic: asked for"} if program.dynamic else set()
    found |= {f"layers: {min(len(program.layers), 3)}"}
    for part in (program, *program.layers):
        values = [getattr(part, field.name) for field in fields(part)]
        found |= {feature(c) for value in values for c in _choices(value)} - _unused(part)
    return frozenset(found)


def choices() -> list[enum.Enum]:
    """Return every choice of the grammar, in its order."""
    of_programs = (
        Heads, Within, Routing, Groups, Sharing, Backward, Wrapping, Running, Poison, Rewrite,
    )  # fmt: skip
    kinds: tuple[type[enum.Enum], ...] = CHOICES_OF_EXPERTS + CHOICES_OF_CAPACITY + of_programs
    return [member for kind in kinds for member in kind]


def all_features() -> list[str]:
    """Return the name of every choice of the grammar, in its order."""
    return [*map(feature, choices())]


def _unused(part: Program | Layer) -> set[str]:
    """Return the features of fields that the layer's style does not read."""
    if not isinstance(part, Experts):
        return set()
    unread = [name for name, styles in READ_IN.items() if part.style not in styles]
    return {feature(getattr(part, name)) for name in unread}


def _choices(value: Any) -> list[enum.Enum]:
    values = value if isinstance(value, frozenset) else (value,)
    return [v for v in values if isinstance(v, enum.Enum)]


def feature(choice: enum.Enum) -> str:
    """Return the name of a choice in the coverage table."""
    return f"{type(choice).__name__.lower()}: {choice.name.lower()}"


def _token_features(tokens: tuple[tuple[int, ...], ...]) -> list[str]:
    found = ["uneven"] if any(len({*step}) > 1 for step in tokens) else []
    found += ["empty rank"] if any(0 in step for step in tokens) else []
    found += ["changing"] if len(set(tokens)) > 1 else []
    found += ["smaller last"] if ends_smaller(tokens) else []
    return found


LEAST: Final = 40
"""Rewritten programs every feature should occur in, of 3,000."""

LEFT_WHOLE: Final = frozenset(map(feature, MIXES_SEQUENCES))
"""Features for which all programs tried count: leaving these whole is correct."""


class Coverage:
    """Counts over the programs of one campaign."""

    def __init__(self) -> None:
        """Start empty."""
        self.kinds: Counter[str] = Counter()
        self.num_rewritten = 0
        self.num_may_differ = 0
        self.num_second = 0
        self.cpu_s = 0.0
        self.tried: Counter[str] = Counter()
        self.rewritten: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any]) -> None:
        """Count one program by its outcome and features."""
        self.kinds[line["kind"]] += 1
        self.cpu_s += line["cpu_s"]
        self.num_second += line["second"]
        if line["kind"] == Outcome.INVALID.value:
            return
        self.num_rewritten += line["rewritten"]
        self.num_may_differ += line["may_differ"]
        self.tried.update(line["features"])
        self.rewritten.update(line["features"] if line["rewritten"] else [])
        self.failed.update(line["features"] if line["failed"] else [])
        if line["source"]:
            self.failures.append(line)

    def lacks(self, name: str) -> int:
        """Return the number of programs that still lack the choice of this name."""
        return max(0, LEAST - self._counted(name))

    def _counted(self, name: str) -> int:
        """Return the number of rewritten programs with a choice; for a decoy, of all programs."""
        return self.tried[name] if name in LEFT_WHOLE else self.rewritten[name]

    @property
    def num_valid(self) -> int:
        """Programs that say something about megamoe."""
        return self.kinds.total() - self.kinds[Outcome.INVALID.value]

    @property
    def num_failed(self) -> int:
        """Programs megamoe failed."""
        return sum(self.kinds[kind.value] for kind in FAILURES)

    def progress(self) -> str:
        """Return one line on how far it is."""
        invalid = self.kinds[Outcome.INVALID.value]
        each = self.cpu_s / max(1, self.kinds.total())
        return (
            f"{self.num_rewritten} rewritten, {self.num_failed} failed, {invalid} invalid, "
            f"{each:.1f} CPU s each, {self.num_valid} programs"
        )

    def summary(self, seconds: float) -> str:
        """Return the result in a few lines."""
        kinds = ", ".join(f"{self.kinds[kind.value]} {kind.value}" for kind in Outcome)
        share = self.num_rewritten / max(1, self.num_valid)
        return (
            f"{self.num_valid} distinct programs in {seconds / 60:.0f} min ({kinds}); "
            f"{self.num_rewritten} rewritten ({share:.0%}): a region of them as asked; "
            f"{self.num_may_differ} compared within a bound of last bits; "
            f"{self.num_second} judged anew after a hang, a broken link or a process that died"
        )

    def table(self) -> str:
        """Return features by programs tried, rewritten and failed; rare ones are marked."""
        known = all_features()
        names = [*known, *sorted(set(self.tried) - set(known))]
        width = max(len(name) for name in names)
        rows = [f"{'feature':{width}}  tried  rewritten  failed"]
        for name in names:
            rare = f"  under {LEAST}" if self.lacks(name) else ""
            counts = f"{self.tried[name]:5}  {self.rewritten[name]:9}  {self.failed[name]:6}"
            rows.append(f"{name:{width}}  {counts}{rare}")
        return "\n".join(rows)


def add_record(path: Path, seed: int, coverage: Coverage, seconds: float) -> None:
    """Add a campaign to the JSON file at `path`, made where it does not exist."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    run = _run(seed, coverage, seconds)
    same = ("seed", "commit")
    kept = [old for old in runs if any(old[key] != run[key] for key in same)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({"runs": [*kept, run]}, indent=1) + "\n")
    partial.replace(path)


def covered(path: Path) -> Coverage:
    """Return features tried and rewritten by all campaigns of the file at `path`."""
    coverage = Coverage()
    for run in json.loads(path.read_text())["runs"]:
        for name, (tried, rewritten, failed) in run["features"].items():
            coverage.tried[name] += tried
            coverage.rewritten[name] += rewritten
            coverage.failed[name] += failed
    return coverage


def _run(seed: int, coverage: Coverage, seconds: float) -> dict[str, Any]:
    return {
        "seed": seed,
        "commit": revision(),
        "date": str(datetime.now(UTC).date()),
        "command": recorded_command("moe_compile.testing.fuzz", sys.argv[1:]),
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "minutes": round(seconds / 60, 1),
        "programs": coverage.num_valid,
        "rewritten": coverage.num_rewritten,
        "within_last_bits": coverage.num_may_differ,
        "failed": coverage.num_failed,
        "judged_twice": coverage.num_second,
        "by_kind": dict(coverage.kinds),
        "failures": [
            {key: failure[key] for key in ("kind", "number", "detail", "source")}
            for failure in coverage.failures
        ],
        "features": {
            name: [coverage.tried[name], coverage.rewritten[name], coverage.failed[name]]
            for name in sorted(coverage.tried)
        },
    }
