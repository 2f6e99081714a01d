"""`python -m benchmarks.planner.recorded_prediction FILE...`: predictions against recorded steps.

Contract
    FILEs are results of `benchmarks.link.overlap` in virtual time: real products, Inductor's code.
    Rates are those that the file's run measured first, but for memory's: a copy's rate is not that
    of a processor's gathers, sorts and exponentials. It is set such that one step of the file, its
    first case in one chunk without a link, takes the time recorded; that step is left out of the
    errors. The errors with the copy's rate are told beside.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.link.cases import NO_LINK_RATIO
from benchmarks.link.subjects import OneLayer
from benchmarks.planner.planned_models import fake_group
from benchmarks.planner.predicted_layer import PredictedLayer, predict_layer
from benchmarks.planner.recorded_case import case_of, profile_of, with_link
from moe_compile.hardware import HardwareProfile
from moe_compile.report.provenance import recorded_command

VARIANT: Final = "megamoe N="
MEMORY_BOUNDS: Final = (0.1, 1000.0)
"""GB/s between which the rate of memory is looked for."""
HALVINGS: Final = 50
WIDTH: Final = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """One number of chunks at one ratio, predicted and recorded; times are milliseconds."""

    file: str
    name: str
    ratio: str
    num_chunks: int
    predicted_ms: float
    by_copy_ms: float
    """Predicted with the rate of a copy for memory."""
    measured_ms: float
    chosen: int
    chosen_by_copy: int
    interval: tuple[float, float]
    """Of the ratio to plain Inductor's step in the same round, 95 %."""

    @property
    def error(self) -> float:
        """Return by which share the prediction is too long."""
        return self.predicted_ms / self.measured_ms - 1.0

    @property
    def error_by_copy(self) -> float:
        """Return the same with the rate of a copy."""
        return self.by_copy_ms / self.measured_ms - 1.0


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One case of a file."""

    head: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    layer: PredictedLayer
    profile: HardwareProfile

    @classmethod
    def of(cls, report: Mapping[str, Any], head: Mapping[str, Any]) -> _Recorded:
        case = case_of(head)
        subject = OneLayer(case, fake_group(case.num_ranks)).of(None)
        rows = [r for r in report["rows"] if r["case"] == case.name and _chunks_of(r)]
        layer = predict_layer(subject.module, subject.tokens)
        return cls(head, rows, layer, profile_of(head))

    def linked(self, hardware: HardwareProfile, ratio: str) -> HardwareProfile:
        if ratio == NO_LINK_RATIO:
            return replace(hardware, link_gb_per_s=math.inf, link_latency_us=0.0)
        return with_link(hardware, self.head, ratio)

    def memory_gb_per_s(self) -> float:
        """Return the rate with which the step in one chunk without a link is as recorded."""
        recorded = next(
            r["ms"] for r in self.rows if r["ratio"] == NO_LINK_RATIO and _chunks_of(r) == 1
        )
        low, high = MEMORY_BOUNDS
        for _ in range(HALVINGS):
            rate = math.sqrt(low * high)
            alone = self.linked(replace(self.profile, memory_gb_per_s=rate), NO_LINK_RATIO)
            too_slow = self.layer.us(1, alone) > recorded * 1e3
            low, high = (rate, high) if too_slow else (low, rate)
        return low


def recorded_steps(path: Path) -> Iterator[RecordedStep]:
    """Return every step of a file whose exchanges took time, predicted."""
    report = json.loads(path.read_text())
    cases = [_Recorded.of(report, head) for head in report["cases"]]
    memory = cases[0].memory_gb_per_s()
    for case in cases:
        for row in case.rows:
            if row["ratio"] == NO_LINK_RATIO:
                continue
            num_chunks = _chunks_of(row)
            by_copy = case.linked(case.profile, row["ratio"])
            hardware = replace(by_copy, memory_gb_per_s=memory)
            yield RecordedStep(
                file=path.name,
                name=case.head["name"],
                ratio=row["ratio"],
                num_chunks=num_chunks,
                predicted_ms=case.layer.us(num_chunks, hardware) / 1e3,
                by_copy_ms=case.layer.us(num_chunks, by_copy) / 1e3,
                measured_ms=row["ms"],
                chosen=_chosen(case, hardware),
                chosen_by_copy=_chosen(case, by_copy),
                interval=tuple(row["vs_inductor_interval"]),
            )


def summary(steps: Sequence[RecordedStep]) -> dict[str, Any]:
    """Return errors, and what the choices cost against the best recorded and one chunk."""
    by_setting: dict[tuple[str, str, str], dict[int, RecordedStep]] = {}
    for step in steps:
        by_setting.setdefault((step.file, step.name, step.ratio), {})[step.num_chunks] = step
    settings = list(by_setting.values())
    first = steps[0].name
    return {
        "settings": len(settings),
        "steps": len(steps),
        "mape": _mape(s.error for s in steps),
        "mape_of_other_cases": _mape(s.error for s in steps if s.name != first),
        "largest_error": max(abs(s.error) for s in steps),
        "mape_by_copy": _mape(s.error_by_copy for s in steps),
        "choices": _choices([(e, e[e[1].chosen]) for e in settings]),
        "choices_by_copy": _choices([(e, e[e[1].chosen_by_copy]) for e in settings]),
    }


def _choices(pairs: Sequence[tuple[Mapping[int, RecordedStep], RecordedStep]]) -> dict[str, Any]:
    """Return what choices cost; each is given with all numbers of chunks of its setting."""
    best = [min(step.measured_ms for step in every.values()) for every, _ in pairs]
    regrets = [c.measured_ms / least - 1.0 for (_, c), least in zip(pairs, best, strict=True)]
    return {
        "largest_regret": max(regrets),
        "mean_regret": statistics.mean(regrets),
        "slowest_against_one_chunk": max(c.measured_ms / e[1].measured_ms - 1.0 for e, c in pairs),
        "surely_slower_than_one_chunk": sum(c.interval[0] > e[1].interval[1] for e, c in pairs),
    }


def _chosen(case: _Recorded, hardware: HardwareProfile) -> int:
    return case.layer.decide(hardware).chosen.candidate.num_chunks


def _mape(errors: Iterator[float]) -> float | None:
    found = [abs(error) for error in errors]
    return statistics.mean(found) if found else None


def _chunks_of(row: Mapping[str, Any]) -> int:
    """Return the number of chunks of a row of megamoe's with an unquantised wire; else 0."""
    number = row["variant"].removeprefix(VARIANT)
    is_ours = number != row["variant"] and row["ms"] is not None
    return int(number) if is_ours and number.isdigit() else 0


def main() -> int:
    """Print every step and the summary; write the JSON asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.recorded_prediction")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args()
    torch._dynamo.config.capture_scalar_outputs = True
    steps = [step for path in arguments.files for step in recorded_steps(path)]
    report = {
        "command": recorded_command("benchmarks.planner.recorded_prediction", sys.argv[1:]),
        "summary": summary(steps),
        "rows": [{**asdict(s), "error": s.error, "error_by_copy": s.error_by_copy} for s in steps],
    }
    table = Table(title="Recorded steps in virtual time, ms; * is the planner's choice")
    for heading in ("file", "case", "comp:comm", "N", "predicted", "recorded", "error", "by copy"):
        table.add_column(heading)
    for s in steps:
        number = f"{s.num_chunks}{'*' if s.num_chunks == s.chosen else ''}"
        times = (f"{s.predicted_ms:.1f}", f"{s.measured_ms:.1f}")
        table.add_row(
            s.file, s.name, s.ratio, number, *times, f"{s.error:+.1%}", f"{s.error_by_copy:+.1%}"
        )
    console = Console(width=WIDTH)
    console.print(table)
    console.print(report["summary"])
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
