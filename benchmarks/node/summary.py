"""The tables at the end, one per section, and the bars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from moe_compile.check.bars import Look, Section, no_failure
from moe_compile.check.tables import new_table, print_bars, print_sections

BARS: Final[tuple[tuple[str, str, Look], ...]] = (
    ("bits", "every rewrite and option has the bits of eager", no_failure),
)
"""Section, what is wanted, and how it is told."""


def print_summary(console: Console, out: Path, summary: Mapping[str, Any]) -> None:
    """Print a table per section, how each ended, and the bars."""
    print_sections(console, out, summary, {"bits": _bits})
    print_bars(console, out, summary, BARS)


def _bits(section: Section) -> Table:
    table = new_table("Programs against eager", "program", "ranks", "found", "as", "s")
    for row in section["rows"]:
        table.add_row(
            row["program"],
            str(row["ranks"]),
            row["found"],
            ", ".join(row["verdicts"]),
            f"{row['seconds']:.1f}",
        )
    return table
