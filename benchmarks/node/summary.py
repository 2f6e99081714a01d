"""The tables at the end, one per section, and the bars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.bars import Look, no_failure, print_bars
from benchmarks.node.beside import OWN, said_of
from moe_compile.check.links import link_of
from moe_compile.check.tables import Section, new_table, print_sections

TIMES: Final = ("exposed_ms", "hidden_ms")
NUMBERS: Final = ("contention", "overlap_slowdown")
MOST_CONTENTION: Final = 0.3
"""By which a product slows beside an exchange with the backend's own CTAs. A node's link takes 16
SMs in the profile h100, 0.138."""
MOST_SLOWDOWN: Final = 0.5
"""By which an exchange slows beside products: as between nodes in DeepSeek's traces, 1.3 to 1.5."""


def _beside_most(name: str, most: float) -> Look:
    """Return the look at one of the two numbers, of the backend's own CTAs."""

    def look(section: Section) -> tuple[bool, str]:
        rows = [row for row in section["rows"] if row["budget"] == said_of(OWN)]
        worst = max(row[name] for row in rows)
        return worst <= most, f"{worst:.2f}"

    return look


def _share_of_exchanges(section: Section) -> tuple[bool, str]:
    num_ranks = min(row["ranks"] for row in section["rows"])
    link = link_of(section["rows"], num_ranks)
    share = link["gb_per_s"] / link["gather_gb_per_s"]
    return share >= LEAST_SHARE, f"{share:.2f} of a gather's rate among {num_ranks} ranks"


def _no_slower(section: Section) -> tuple[bool, str]:
    ours = [s for s in section["steps"] if s["variant"].startswith("megamoe")]
    best = min(ours, key=lambda step: step["step_ms"])
    found = best["vs_best_inductor"]
    said = f"{best['variant']}: {found['median']:.3f} ({found['low']:.3f}-{found['high']:.3f})"
    return found["high"] < 1.0, said


def _as_predicted(section: Section) -> tuple[bool, str]:
    """Look at what is predicted to be exposed of a layer in chunks, over all its communication."""
    rows = [row for row in section["rows"] if row["variant"] in CHUNKED]
    if not rows:
        raise LookupError(", ".join(CHUNKED))
    off = [
        abs(row["predicted"]["exposed_ms"] - row["exposed_ms"])
        / (row["exposed_ms"] + row["hidden_ms"])
        for row in rows
    ]
    return max(off) <= MOST_OFF, f"{max(off):.2f} of the communication"


CHUNKED: Final = ("megamoe N=1", "megamoe N=2", "megamoe N=4")
MOST_OFF: Final = 0.25
"""By which predicted exposed time may miss the measured, as a share of all communication."""
LEAST_SHARE: Final = 0.5
"""Of an all-gather's rate, that an exchange reaches: 0.75 in the profile h100."""

BARS: Final[tuple[tuple[str, str, Look], ...]] = (
    ("beside", f"a product beside an exchange slows by {MOST_CONTENTION} at most",
     _beside_most("contention", MOST_CONTENTION)),
    ("beside", f"an exchange beside products slows by {MOST_SLOWDOWN} at most",
     _beside_most("overlap_slowdown", MOST_SLOWDOWN)),
    ("links", f"large exchanges reach {LEAST_SHARE} of a gather's rate", _share_of_exchanges),
    ("hidden", "results are near eager ones, and every trace has NCCL", no_failure),
    ("hidden", "the fastest number of chunks is faster than Inductor's best", _no_slower),
    ("hidden", f"exposed time is predicted to {MOST_OFF} of the communication", _as_predicted),
    ("bits", "every rewrite and option has the bits of eager", no_failure),
    ("recipes", "small models train as they are written", no_failure),
)  # fmt: skip
"""Section, what is wanted, and how it is told."""


def _beside(section: Section) -> Table:
    table = new_table(
        "Shares by which one slows beside the other", "product", "exchanges with", "product slows",
        "exchange slows", "product us", "exchange us",
    )  # fmt: skip
    for row in section["rows"]:
        table.add_row(
            row["product"],
            row["budget"],
            *(f"{row[n]:.2f} ({row[n + '_low']:.2f}-{row[n + '_high']:.2f})" for n in NUMBERS),
            *(f"{row[n + '_alone_us']:.0f}" for n in NUMBERS),
        )
    return table


def _hidden(section: Section) -> Table:
    table = new_table(
        "One layer, ms", "variant", "step", "vs best inductor", "exposed", "hidden",
        "predicted exposed", "predicted hidden", "worst error", "compile s",
    )  # fmt: skip
    steps = {step["variant"]: step for step in section.get("steps", [])}
    for row in section["rows"]:
        step = steps.get(row["variant"])
        against = step and step["vs_best_inductor"]
        table.add_row(
            row["variant"],
            f"{step['step_ms']:.2f}" if step else "",
            f"{against['median']:.3f}" if against else "",
            *(f"{row[name]:.2f}" if name in row else "not traced" for name in TIMES),
            *(f"{row['predicted'][n]:.2f}" if n in row["predicted"] else "" for n in TIMES),
            f"{max(row['errors'].values()):.4f}",
            f"{row['compile_s']:.0f}",
        )
    return table


def _links(section: Section) -> Table:
    table = new_table("Collectives", "", "ranks", "bytes", "us", "GB/s")
    for row in section["rows"]:
        numbers = (f"{row['us']:.1f}", f"{row['gb_per_s']:.3g}")
        table.add_row(row["collective"], str(row["ranks"]), str(row["bytes"]), *numbers)
    return table


def print_summary(console: Console, out: Path, summary: Mapping[str, Any]) -> None:
    """Print a table per section, how each ended, and the bars."""
    print_sections(console, out, summary, TABLES)
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


def _recipes(section: Section) -> Table:
    table = new_table("Training jobs", "recipe", "steps", "last loss", "as written", "off", "s")
    for row in section["rows"]:
        table.add_row(
            row["recipe"],
            str(row["steps"]),
            *(f"{row[name][-1]:.4f}" if row[name] else "" for name in ("losses", "as_written")),
            f"{row['most_off']:.4f}",
            f"{row['seconds']:.0f}",
        )
    return table


TABLES: Final = {
    "beside": _beside, "links": _links, "hidden": _hidden, "bits": _bits, "recipes": _recipes,
}  # fmt: skip
