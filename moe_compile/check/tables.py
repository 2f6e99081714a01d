"""The tables that end a check: the findings of each section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from moe_compile.check.sections import read_section

Section = Mapping[str, Any]

MOST_FAILURES: Final = 12
"""Failures printed; the files have all."""


def new_table(title: str, *columns: str) -> Table:
    """Return an empty table, its first column flush left and the others right."""
    table = Table(title=title, title_justify="left", box=None)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def print_sections(
    console: Console,
    out: Path,
    summary: Mapping[str, Any],
    tables: Mapping[str, Callable[[Section], Table]],
) -> None:
    """Print a table for each section, its failed and skipped items, then how each ended."""
    for name in summary["sections"]:
        section = read_section(out, name)
        if section.get("rows"):
            console.print(tables[name](section))
        for failure in section.get("failures", [])[:MOST_FAILURES]:
            console.print(f"{name}: {failure['what']}: {failure['why']}"[:300], markup=False)
        for warning in section.get("warnings", []):
            console.print(f"warning: {warning}", markup=False)
        for skipped in section.get("skipped", []):
            console.print(f"{name}: skipped {skipped['what']}: {skipped['why']}", markup=False)
    for name, found in summary["sections"].items():
        console.print(f"{name}: {found['status']} in {found.get('seconds', 0)} s", highlight=False)
