"""Run `megamoe bisect`: on the ranks of a job, or by a command that is run again and again.

Contract
    The exit status is 0 where a culprit was found, else 1, and the last lines say why.
    What was tried, and what was found, is in `summary.json`.
    A command is good where it ends with 0 in its time. Passes are left out of it by
    MEGAMOE_DISABLE_PASSES, and the first run's report says which of them changed a graph.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from moe_compile.check.culprit import find_regions, in_order, is_found, sentences
from moe_compile.check.limited_process import run_limited
from moe_compile.check.ranks import Ranks
from moe_compile.check.same import Place, places_of
from moe_compile.check.search import find_culprit, said_of
from moe_compile.check.sections import SUMMARY, read_section, run_sections, say, write_json
from moe_compile.check.summary import WIDTH, begun
from moe_compile.check.tables import new_table

CULPRIT: Final = "culprit"
NOTHING: Final = "nothing differs: megamoe and the program as written give the same results"
NO_END: Final = "the search did not end (status {status}): see the logs beside the results"
GOOD: Final = (
    "the command succeeds (status 0) with all passes of megamoe, so there is no failure to find"
)
NO_PASS: Final = (
    "the command also fails when all passes are left out. Either no pass is at fault, or the "
    "program sets megamoe.disable_passes in options=, which overrides the environment variable"
)
DISABLE: Final = "MEGAMOE_DISABLE_PASSES"
REPORT: Final = "MEGAMOE_REPORT"
GRACE_S: Final = 10.0
"""For a command that took too long to end what it has started."""


def bisect_job(ranks: Ranks, out: Path, head: Mapping[str, Any], budget_s: float) -> int:
    """Search on `ranks`, of which this is the first; return the exit status."""
    summary = begun(head)
    run_sections(out, summary, {CULPRIT: 1.0}, budget_s, ranks.run, longest_s=budget_s)
    ranks.end()
    section, ended = read_section(out, CULPRIT), summary["sections"][CULPRIT]
    found = section.get(CULPRIT, {})
    if not found:
        is_whole = section.get("is_complete") and not section["failures"]
        found = {"why": NOTHING if is_whole else _why_not(section, ended)}
    tried = [*section.get("rows", ()), *section.get("tried", ())]
    rows = [(row["form"], "right" if row["holds"] else "wrong", row["found"]) for row in tried]
    return _told(out, summary, found, rows)


def _why_not(section: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    failed = next(iter(section.get("failures", ())), None)
    if failed is not None and section.get("is_complete"):
        return f"{failed['what']}: {failed['why']}"
    return NO_END.format(status=ended["status"])


def bisect_command(command: Sequence[str], out: Path, limit_s: float) -> int:
    """Search by a command, each run of at most `limit_s`; return the exit status."""
    trials = CommandTrials(command, out, limit_s)
    if trials.is_right((), "as it is"):
        found: dict[str, Any] = {"why": GOOD}
    else:
        names = in_order(trials.passes())

        def is_right(left_out: frozenset[str]) -> bool:
            asked = [name for name in names if name in left_out]
            return trials.is_right(asked, said_of(names, asked))

        culprit = find_culprit(names, is_right)
        before = trials.left_out_before
        found = {"why": NO_PASS}
        if culprit is not None:
            regions = list(dict.fromkeys(name for name, _ in trials.places))
            within = find_regions(culprit.names, regions, trials.is_right)
            found = {**asdict(culprit), **within, "places": trials.places}
            found |= {"left_out_before": before, "variable": DISABLE}
    summary = {"command": list(command), "tried": trials.rows}
    rows = [
        (row["trial"], "right" if row["status"] == 0 else "wrong", row["found"])
        for row in trials.rows
    ]
    return _told(out, summary, found, rows)


class CommandTrials:
    """Runs of one command without some passes, each with its log."""

    def __init__(self, command: Sequence[str], out: Path, limit_s: float) -> None:
        """Keep logs and the report in `out`."""
        self._command, self._out, self._limit_s = command, out, limit_s
        self._report = out / "report.json"
        self._report.unlink(missing_ok=True)
        self.left_out_before = [n for n in os.environ.get(DISABLE, "").split(",") if n]
        self.rows: list[dict[str, Any]] = []
        self.places: tuple[Place, ...] = ()
        """The regions of the last good run that left a report."""

    def is_right(self, left_out: Sequence[str], said: str) -> bool:
        """Run the command, `said` in words; return whether it ends with 0 in its time."""
        report = self._report if not self.rows else self._out / "report_of_last_trial.json"
        variables = {DISABLE: ",".join([*self.left_out_before, *left_out]), REPORT: str(report)}
        report.unlink(missing_ok=True)
        log, began = self._out / f"run{len(self.rows)}.log", time.monotonic()
        status = run_limited(
            self._command,
            log,
            self._limit_s,
            {**os.environ, **variables},
            keeps_output=True,
            grace_s=GRACE_S,
        )
        seconds = round(time.monotonic() - began, 1)
        found = "it did not end" if status is None else f"status {status}"
        row = {
            "trial": said,
            "without": list(left_out),
            "status": status,
            "found": f"{found} in {seconds:.0f} s: {log.name}",
        }
        self.rows.append(row)
        say(f"{said}: {row['found']}")
        if status == 0 and report.exists():
            self.places = places_of(json.loads(report.read_text()))
        return status == 0

    def passes(self) -> list[str]:
        """Return the passes that changed a graph in the first run; [] where it left no report."""
        if not self._report.exists():
            return []
        passes = json.loads(self._report.read_text())["passes"]
        return list(dict.fromkeys(one["pass"] for one in passes if one.get("applied")))


def _told(
    out: Path,
    summary: dict[str, Any],
    found: Mapping[str, Any],
    rows: Iterable[tuple[str, str, str]],
) -> int:
    """Print and write what was tried and found; return the exit status."""
    console = Console(width=WIDTH)
    table = new_table("Tried", "", "values", "found")
    for column in table.columns:
        column.justify = "left"
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if is_found(found):
        console.print(f"please report it, with the folder {out}", markup=False, highlight=False)
    for line in sentences(found):
        console.print(line, markup=False, highlight=False)
    write_json(out / SUMMARY, {**summary, CULPRIT: found})
    return 0 if is_found(found) else 1
