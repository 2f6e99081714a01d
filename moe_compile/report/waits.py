"""How long collectives were waited for, beside how long it was predicted.

Contract
    A prediction is of the schedule of one graph: how long compute stands at the waits for one
    collective. It is None where a graph has none. Equal names are one collective: where several
    graphs have it, as those of layers that differ, the prediction is their mean.
    Measured times are means over the runs of one rank; of several ranks the one that waits longest
    is shown. Imports no torch.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moe_compile.report.timelines import timelines_of

FILE: Final = "waits.json"
"""File of a rank, beside the file of its errors."""
MOST_ROWS: Final = 12
"""Rows of the table, those with the longest waits, unless all are asked for."""
Name = tuple[str, str, str]
"""Site and phase of a graph, and the node that launches the collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWaits:
    """What one rank measured."""

    rank: int
    steps: int
    """Steps that were measured."""
    waits: Mapping[Name, tuple[float, int]]
    """Collective -> seconds of all its waits, and their number."""

    def write(self, folder: Path) -> None:
        """Leave it in the folder of the rank's own output."""
        waits = [[*name, seconds, runs] for name, (seconds, runs) in self.waits.items()]
        told = {"rank": self.rank, "steps": self.steps, "waits": waits}
        (folder / FILE).write_text(json.dumps(told))

    def ms_per_step(self) -> float:
        """Return how long all collectives of a step were waited for."""
        return 1e3 * sum(seconds for seconds, _ in self.waits.values()) / max(1, self.steps)

    def predicted_ms_per_step(self, predicted_ms: Mapping[Name, float]) -> float:
        """Return how long that was predicted to be, by the predicted wait for each."""
        total = sum(predicted_ms.get(name, 0.0) * n for name, (_, n) in self.waits.items())
        return total / max(1, self.steps)

    def and_those_of(self, other: RankWaits) -> RankWaits:
        """Return these waits and those of other steps of the rank."""
        waits = dict(other.waits)
        for name, (seconds, runs) in self.waits.items():
            before, number = waits.get(name, (0.0, 0))
            waits[name] = seconds + before, runs + number
        return replace(self, steps=self.steps + other.steps, waits=waits)


def read_waits(run: Path) -> list[RankWaits]:
    """Return what the ranks left in a run's folder, by rank; of several attempts the last."""
    found: dict[int, RankWaits] = {}
    for file in sorted(run.glob(f"attempt_*/*/{FILE}"), key=_attempt):
        try:
            told = json.loads(file.read_text())
        except ValueError:  # the rank was ended while it wrote
            continue
        waits = {(site, phase, node): (s, runs) for site, phase, node, s, runs in told["waits"]}
        found[told["rank"]] = RankWaits(rank=told["rank"], steps=told["steps"], waits=waits)
    return [found[rank] for rank in sorted(found)]


def _attempt(file: Path) -> int:
    """Return the number of the attempt that left a file, by its folder `attempt_N`."""
    number = file.parts[-3].rpartition("_")[2]
    return int(number) if number.isdecimal() else -1


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveWait:
    """The wait for one collective, on the rank that waits longest for it."""

    name: Name
    measured_ms: float
    """Mean of the waits of `rank`."""
    rank: int
    per_step: float
    """Waits in a step of `rank`."""
    predicted_ms: float | None


def predicted_waits_ms(report: Mapping[str, Any]) -> dict[Name, float]:
    """Return the predicted wait for each collective of the graphs that megamoe ordered."""
    found: dict[Name, list[float]] = {}
    for graph in timelines_of(report):
        if graph.is_rewritten and graph.runs[-1].waits:
            for node, us in graph.runs[-1].waited_us().items():
                found.setdefault((graph.where, graph.phase, node), []).append(us / 1e3)
    return {name: statistics.mean(each) for name, each in found.items()}


def waits_of(
    predicted_ms: Mapping[Name, float], ranks: Sequence[RankWaits]
) -> list[CollectiveWait]:
    """Return the wait for each collective, the longest of a step first."""
    worst: dict[Name, CollectiveWait] = {}
    for one in ranks:
        for name, (seconds, runs) in one.waits.items():
            measured = CollectiveWait(
                name=name,
                measured_ms=1e3 * seconds / runs,
                rank=one.rank,
                per_step=runs / max(1, one.steps),
                predicted_ms=predicted_ms.get(name),
            )
            if name not in worst or worst[name].measured_ms < measured.measured_ms:
                worst[name] = measured
    return sorted(worst.values(), key=lambda wait: -wait.measured_ms * wait.per_step)


def print_waits(
    report: Mapping[str, Any],
    ranks: Sequence[RankWaits],
    console: Console | None = None,
    *,
    verbose: bool = False,
) -> None:
    """Print a table of the collectives, and a line on a whole step; or why nothing was measured."""
    console = console or Console()
    predicted_ms = predicted_waits_ms(report)
    waits = waits_of(predicted_ms, ranks)
    if not waits:
        console.print(_why_none(ranks), highlight=False, soft_wrap=True)
        return
    shown = waits if verbose else waits[:MOST_ROWS]
    console.print(_table(shown))
    if len(waits) > len(shown):
        console.print(
            f"{len(waits) - len(shown)} more collectives have shorter waits than these; "
            "--verbose lists them."
        )
    line = _of_a_step(max(ranks, key=RankWaits.ms_per_step), predicted_ms)
    console.print(line, highlight=False, soft_wrap=True)


def _table(waits: Sequence[CollectiveWait]) -> Table:
    title = "Waits for collectives: ms each, measured on the rank that waits longest"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("where", no_wrap=True)
    for heading in ("predicted", "measured", "rank", "waits\nper step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for graph in dict.fromkeys(wait.name[:2] for wait in waits):
        site, phase = graph
        table.add_row(f"{site.partition(' in ')[0]} {phase}")
        for wait in (one for one in waits if one.name[:2] == graph):
            table.add_row(
                f"  {wait.name[2]}",
                "-" if wait.predicted_ms is None else f"{wait.predicted_ms:.2f}",
                f"{wait.measured_ms:.2f}",
                str(wait.rank),
                f"{wait.per_step:g}",
            )
    return table


def _of_a_step(longest: RankWaits, predicted_ms: Mapping[Name, float]) -> str:
    return (
        f"Waits of a step: {longest.ms_per_step():.2f} ms measured on rank {longest.rank}, which "
        f"waits longest; {longest.predicted_ms_per_step(predicted_ms):.2f} ms predicted. Measured "
        f"in {_counted(longest.steps)}."
    )


def _why_none(ranks: Sequence[RankWaits]) -> str:
    if not any(one.steps for one in ranks):
        return (
            "Waits for collectives were not measured: only logged steps are measured, and the "
            "first step compiles. To measure more steps, lower metrics.log_freq."
        )
    return "No wait for a collective was measured: no graph that megamoe ordered waits for one."


def _counted(steps: int) -> str:
    return f"{steps} logged step{'s' if steps != 1 else ''} after the first"
