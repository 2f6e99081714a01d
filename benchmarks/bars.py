"""The verdicts on the bars of the checks on GPUs.

Contract
    A bar holds, is missed, or is open: its section did not run, or not to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from moe_compile.check.sections import read_section
from moe_compile.check.tables import Section, new_table

Look = Callable[[Section], tuple[bool, str]]

OTHERS: Final = "inductor"
"""Prefix of items that only compare with others: they may be skipped."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar and its verdict."""

    what: str
    holds: bool | None
    """None where it is open."""
    found: str = ""


def judge(sections: Mapping[str, Section], bars: Sequence[tuple[str, str, Look]]) -> list[Bar]:
    """Return the verdicts on `bars`; each has a section, a text, and a function that judges it.

    `sections` are results by name, {} of one that did not run.
    """
    return [_judged(what, sections.get(name, {}), look) for name, what, look in bars]


def _judged(what: str, section: Section, look: Look) -> Bar:
    if not section.get("is_complete") or not section.get("rows"):
        return Bar(what, None, "not run to its end")
    try:
        return Bar(what, *look(section))
    except (LookupError, TypeError, ValueError) as error:  # skipped, or no number was found
        return Bar(what, None, f"not measured: {error}")


def no_failure(section: Section) -> tuple[bool, str]:
    """Return whether nothing failed; raise LookupError where something of ours was skipped."""
    failures = [failure["what"] for failure in section["failures"]]
    skipped = [one["what"] for one in section.get("skipped", [])]
    ours = [what for what in skipped if not what.startswith(OTHERS)]
    if ours and not failures:
        raise LookupError(f"skipped {ours[0]}")
    return not failures, ", ".join(failures[:3]) or f"none failed, {len(skipped)} skipped"


SAID: Final = {True: "holds", False: "MISSED", None: "open"}


def print_bars(
    console: Console,
    out: Path,
    summary: Mapping[str, Any],
    bars: Sequence[tuple[str, str, Look]],
) -> None:
    """Print the verdicts on the bars."""
    is_gpu = summary["device"] == "cuda"
    title = "Bars" if is_gpu else "Bars, for a GPU: times are no measurement here"
    table = new_table(title, "", "", "found")
    sections = {name: read_section(out, name) for name, _, _ in bars}
    for bar in judge(sections, bars):
        table.add_row(bar.what, SAID[bar.holds], bar.found)
    console.print(table)
