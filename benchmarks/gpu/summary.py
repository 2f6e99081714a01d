"""The short tables at the end: what a reader of the last lines of output must know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bars import print_bars
from benchmarks.gpu.bars import BARS
from moe_compile.check.tables import Section, new_table, print_sections


def print_summary(console: Console, out: Path, summary: Mapping[str, Any]) -> None:
    """Print a table per section, then how each ended."""
    tables = {
        "kernels": _kernels,
        "slices": _slices,
        "layer": _layer,
        "trace": _trace,
        "link": _link,
        "tests": _tests,
    }
    print_sections(console, out, summary, tables)
    print_bars(console, out, summary, BARS)


def _kernels(section: Section) -> Table:
    inductor = {(r["op"], r["rows"], r["width"]): r for r in section.get("inductor", [])}
    table = new_table(
        "Quantized rows", "op", "rows", "width", "us", "GB/s", "of a copy", "inductor / ours"
    )
    largest = max(row["rows"] for row in section["rows"])
    for row in [row for row in section["rows"] if row["rows"] == largest]:
        theirs = inductor.get((row["op"], row["rows"], row["width"]))
        table.add_row(
            row["op"] + ("" if row["is_equal"] else " WRONG"),
            str(row["rows"]),
            str(row["width"]),
            f"{row['us']:.1f}",
            f"{row['gb_per_s']:.0f}",
            f"{row['fraction_of_copy']:.2f}",
            f"{theirs['inductor_over_ours']:.2f}" if theirs else "",
        )
    return table


def _slices(section: Section) -> Table:
    table = new_table(
        "Elements that differ from one product of all experts",
        "routing", "width x hidden", "chunks", "rows", "input", "weight",
    )  # fmt: skip
    for row in section["rows"]:
        table.add_row(*map(str, row.values()))
    return table


def _trace(section: Section) -> Table:
    columns = ("forward_copies", "forward_kernels", "backward_copies", "backward_kernels")
    table = new_table(
        "Copies to the host, and kernels", "variant", *(c.replace("_", " ") for c in columns)
    )
    for row in section["rows"]:
        table.add_row(row["variant"], *(str(row[column]) for column in columns))
    return table


def _layer(section: Section) -> Table:
    table = new_table(
        "Layer, one rank", "variant", "worst error", "x inductor", "step ms", "host ms", "compile s"
    )
    for row in section["rows"]:
        times = [t for t in row["times_inductors"].values() if t is not None]
        errors = [e for e in row["errors"].values() if e is not None]
        table.add_row(
            row["variant"],
            f"{max(errors):.4f}" if len(errors) == len(row["errors"]) else "NaN",
            f"{max(times):.2f}" if times else "",
            f"{row['step_ms']:.2f}",
            f"{row['host_ms']:.2f}",
            f"{row['compile_s']:.0f}",
        )
    return table


def _link(section: Section) -> Table:
    table = new_table(
        "Emulated link, one GPU",
        "compute : comm",
        "variant",
        "ms",
        "link ms",
        "host ms",
        "x bound",
        "vs inductor",
        "vs best inductor",
    )
    for row in section["rows"]:
        table.add_row(
            row["setting"],
            row["variant"],
            f"{row['ms']:.2f}",
            f"{row['link_ms']:.2f}",
            f"{row['host_ms']:.2f}",
            f"{row['over_bound']:.2f}",
            _with_interval(row["vs_inductor"]),
            _with_interval(row["vs_best_inductor"]),
        )
    return table


def _tests(section: Section) -> Table:
    table = new_table("Tests", "run", "tests", "failures", "errors", "skipped", "seconds")
    for row in section["rows"]:
        counts = ("tests", "failures", "errors", "skipped", "seconds")
        table.add_row(row["run"], *(str(row.get(count, "")) for count in counts))
    return table


def _with_interval(estimate: Mapping[str, Any]) -> str:
    return f"{estimate['median']:.3f} ({estimate['low']:.3f}-{estimate['high']:.3f})"
