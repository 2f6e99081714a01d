"""Print a report for a person.

Contract
    Reads the JSON data of `moe_compile.report.process_report`; imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

LOG_WIDTH: Final = 120
"""Columns when the output is no terminal but a file."""


def print_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print regions, schedule and what was left alone, as tables."""
    console = console or Console()
    if not console.is_terminal:
        console.width = LOG_WIDTH
    if report["regions"]:
        console.print(_regions(report))
    if report["attention"]:
        console.print(_attention(report))
    if report["graphs"]:
        console.print(_graphs(report))
    if any("contention" in graph for graph in report["graphs"]):
        console.print(_slowdowns(report), highlight=False)
    for line in _lines(report):
        console.print(line, highlight=False)
    console.print(
        f"Compilations with regions: {report['compilations']}, of these recompiles: "
        f"{report['recompiles']}. Times are predicted for hardware profile "
        f"{report['hardware']!r}, not measured.",
        highlight=False,
    )


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    for title, key in (("Reason alone", "left_alone"), ("Passes left out", "dropped_passes")):
        yield from (f"{title}: {line}" for line in report[key])
    for setting in report.get("inductor_settings_off", ()):  # none in reports of earlier versions
        yield f"Inductor's setting off in graphs with regions: {setting}"
    for place in report.get("graph_breaks", ()):  # none in reports of earlier versions
        yield f"Dynamo ends a graph at {place}"
    rewrites = report.get("rewrites", ())  # none in reports of earlier versions
    yield from (f"Rewrite {line}" for line in rewrites)
    yield from report.get("warnings", ())
    if not report["compilations"] and not rewrites:
        yield "No MoE region was found; the code is Inductor's alone."


def _regions(report: Mapping[str, Any]) -> Table:
    table = Table(title="MoE regions", box=SIMPLE_HEAD)
    table.add_column("where", no_wrap=True)
    for heading in ("ranks", "local\nexperts", "chunks", "host reads\nper pass"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for region in report["regions"]:
        table.add_row(
            _place(region["where"]),
            str(region["num_ranks"]),
            str(region["num_local_experts"]),
            str(region["num_chunks"]),
            str(region["num_host_reads"]),
            _verdict(region),
        )
    return table


def _attention(report: Mapping[str, Any]) -> Table:
    table = Table(title="Attention", box=SIMPLE_HEAD)
    table.add_column("where", no_wrap=True)
    for heading in ("ranks", "local\nheads", "local\nKV heads", "chunks"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for found in report["attention"]:
        keys = ("num_ranks", "num_heads", "num_kv_heads", "num_chunks")
        figures = (str(found[key]) if found["is_region"] else "-" for key in keys)
        table.add_row(_place(found["where"]), *figures, _verdict(found))
    return table


def _graphs(report: Mapping[str, Any]) -> Table:
    table = Table(title="Compiled graphs: predicted times in ms, memory in MB", box=SIMPLE_HEAD)
    table.add_column("where", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    for heading in (
        "launches",
        "compute",
        "exchanges",
        "hidden",
        "exposed\nbefore -> now",
        "peak\nbefore -> now",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for graph in report["graphs"]:
        launches = sum(len(order) for order in graph["launches"].values())
        table.add_row(
            _place(graph["where"]),
            graph["phase"],
            str(launches),
            *(_scaled(graph.get(key), 1e3) for key in ("compute_us", "exchange_us", "hidden_us")),
            _change(graph, "exposed_us", 1e3),
            _change(graph, "peak_bytes", 1e6),
        )
    return table


def _slowdowns(report: Mapping[str, Any]) -> str:
    """Say by how much compute and collectives slow each other in the times of the graphs."""
    by_collectives, by_compute = (
        max(graph.get(key, 0.0) for graph in report["graphs"])
        for key in ("contention", "overlap_slowdown")
    )
    return (
        f"In these times compute is up to {by_collectives:.0%} slower beside a collective, "
        f"a collective up to {by_compute:.0%} beside compute."
    )


def _verdict(found: Mapping[str, Any]) -> str:
    """Return what was done or why not, remarks, and what to change: a line each."""
    changes = found.get("to_do", ())  # none in reports of earlier versions
    return "\n".join([found["verdict"], *found["remarks"], *changes])


def _place(where: str) -> str:
    """Return `file.py:line` of `file.py:line in function`."""
    return where.partition(" in ")[0]


def _scaled(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.2f}"


def _change(graph: Mapping[str, Any], key: str, unit: float) -> str:
    return f"{_scaled(graph.get(key + '_before'), unit)} -> {_scaled(graph.get(key), unit)}"
