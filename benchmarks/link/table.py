"""Print results for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.link.cases import NO_LINK_RATIO
from benchmarks.link.results import Row, warnings_of


def print_head(console: Console, head: dict[str, Any]) -> None:
    """Print machine, versions, command and clock."""
    for key, value in head.items():
        console.print(f"{key}: {value}", highlight=False)


def print_case(console: Console, head: dict[str, Any], rows: list[Row]) -> None:
    """Print one case: what it was measured with, its table, its warnings."""
    comm = ", ".join(f"{ratio} {ms:.1f} ms" for ratio, ms in head["comm_ms"].items())
    link = next(iter(head["links"].values()))
    console.print(
        f"\n{head['name']}: {head['num_ranks']} ranks, {head['tokens']} tokens each, width "
        f"{head['width']}, hidden {head['hidden']}, {head['experts']} experts, top "
        f"{head['top_k']}; {head['clock']} time; compute {head['compute_ms']:.1f} ms; comm {comm}; "
        f"{head['wire_bytes_per_step'] / 1e6:.2f} MB in {head['exchanges_per_step']} exchanges a "
        f"step; latency {link['latency_us']:.0f} us",
        highlight=False,
    )
    if "inside_mb_per_s" in link:
        console.print(
            f"nodes of {head['num_local']} ranks, {_adapter(head)} to other nodes; inside a node "
            f"{link['inside_mb_per_s'] / link['mb_per_s']:.0f} times the rate, latency "
            f"{link['inside_latency_us']:.0f} us",
            highlight=False,
        )
    console.print(_table(rows))
    for row in rows:
        if row.error and row.ratio == NO_LINK_RATIO:
            console.print(f"{row.variant} failed: {row.error}", style="red", markup=False)
    for warning in warnings_of(rows):
        console.print(f"warning: {warning}", style="yellow", highlight=False)


def _adapter(head: dict[str, Any]) -> str:
    return "one adapter for all" if head["shares_adapter"] else "an adapter each"


def _table(rows: list[Row]) -> Table:
    table = Table()
    for name in ("comp:comm", "variant"):
        table.add_column(name, no_wrap=True)
    for name in (
        "ms",
        "x bound",
        "waited ms",
        "own comm ms",
        "vs inductor",
        "vs reorder",
        "vs rival",
        "vs best bf16",
        "no link, vs inductor",
        "compile s",
    ):
        table.add_column(name, justify="right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.ratio != row.ratio:
            table.add_section()
        table.add_row(row.ratio, row.variant, *_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    if row.ms is None:
        return ["failed"]
    return [
        f"{row.ms:.1f}",
        _number(row.bound_fraction and 1.0 / row.bound_fraction),
        _number(row.waited_ms, digits=1),
        _number(row.own_comm_ms, digits=1),
        _with_interval(row.vs_inductor, row.vs_inductor_interval),
        _number(row.vs_inductor_reorder),
        _number(row.vs_rival),
        _number(row.vs_best_same_wire),
        _with_interval(row.inf_bandwidth_ratio, row.inf_bandwidth_interval),
        _compile_seconds(row),
    ]


def _compile_seconds(row: Row) -> str:
    if not row.compile_s:
        return ""
    return f"{row.compile_s:.1f}{' cached' if row.compile_from_cache else ''}"


def _number(value: float | None, *, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None or interval is None:
        return ""
    return f"{value:.3f} ({interval[0]:.3f}-{interval[1]:.3f})"
