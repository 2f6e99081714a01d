"""Print a report for a person.

Contract
    Reads the JSON data of `moe_compile.report.process_report`; imports no torch.
"""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moe_compile.allowed_values import NAMED
from moe_compile.report.explanation_text import headline

LOG_WIDTH: Final = 120
"""Width where the output is a file, no terminal, and of tables that are asked for."""
TABLES_FROM: Final = 112
"""Width of the widest table; in fewer columns its cells are cut into pieces."""
DETAILS: Final = (
    f"For tables of graphs, times and memory use --verbose or {TABLES_FROM} columns or more."
)


def print_report(
    report: Mapping[str, Any], console: Console | None = None, *, verbose: bool = False
) -> None:
    """Print one line on the gain, then details: as tables where they fit or `verbose`."""
    console = console or Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = LOG_WIDTH
    if line := headline(report):
        console.print(line, highlight=False)
    if not (is_wide := console.width >= TABLES_FROM) and not verbose:
        for line in short_lines(report):
            folded = textwrap.wrap(line, console.width - 1, subsequent_indent="      ")
            console.print("\n".join(folded), highlight=False, markup=False)
        return
    if not is_wide:
        console.width = LOG_WIDTH
    _print_tables(report, console)


def short_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines for a narrow terminal: one for each region, and one for each exception."""
    rows: Counter[str] = Counter()
    for region in report["regions"]:
        rows[f"{_place(region['where'])}: {_entry(region, _short_verdict(region))}"] += 1
    for found in report["attention"]:
        if found["is_region"]:
            rows[f"{_place(found['where'])}: attention, {_entry(found, found['verdict'])}"] += 1
    for text, number in rows.items():
        first, *others = text.splitlines()
        yield f"  {first}" + (f" ({number} times)" if number > 1 else "")
        yield from (f"    {line}" for line in others)
    yield from _lines({**report, "left_alone": ()})
    yield DETAILS


def _short_verdict(region: Mapping[str, Any]) -> str:
    number, experts = region["num_chunks"], region["num_local_experts"]
    chunks = f", {number} chunks" if number > 1 else ""
    return f"{region['verdict']}{chunks}, {experts} experts on each of {region['num_ranks']} ranks"


def _print_tables(report: Mapping[str, Any], console: Console) -> None:
    if report["regions"]:
        console.print(_regions(report))
    if report["attention"]:
        console.print(_attention(report))
    if report["graphs"]:
        console.print(_graphs(report))
    if any(g.get("contention") or g.get("overlap_slowdown") for g in report["graphs"]):
        console.print(_slowdowns(report), highlight=False)
    if host_us := sum(graph.get("host_us", 0.0) for graph in report["graphs"]):
        console.print(
            f"For {_scaled(host_us, 1e3)} ms of the exposed time, compute waits for the host, "
            "which reads counts, unpacks them and launches collectives.",
            highlight=False,
        )
    for line in _lines(report):
        console.print(line, highlight=False)
    if hidden := _hidden(report["graphs"]):
        console.print(hidden, highlight=False)
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
        yield f"Inductor's setting that is off in graphs with regions: {setting}"
    for place in report.get("graph_breaks", ()):  # none in reports of earlier versions
        yield f"Dynamo ends a graph at {place}"
    for place in dict.fromkeys(_read_alone(report)):
        yield f"The host reads a single integer, and may wait for it, at {place}"
    yield from dict.fromkeys(text for graph in report["graphs"] if (text := _kept(graph)))
    yield from dict.fromkeys(lines_of_named_parts(report))
    yield from dict.fromkeys(_offloaded(report))
    rewrites = report.get("rewrites", ())  # none in reports of earlier versions
    yield from (f"Rewrite {line}" for line in rewrites)
    yield from report.get("warnings", ())
    if not report["compilations"] and not rewrites:
        yield (
            "No MoE region was found, so megamoe changed nothing, and Inductor compiled the "
            "program as written."
        )
    yield from names_without_effect(report)
    yield from report.get("regions_not_found", ())


def _kept(graph: Mapping[str, Any]) -> str:
    """Return a line on what a forward graph keeps for its backward by price; "" for any other."""
    if "kept_bytes_allowed" not in graph:
        return ""
    before, kept, allowed, again = (
        graph[key] / 1e6
        for key in ("kept_bytes_before", "kept_bytes", "kept_bytes_allowed", "again_bytes")
    )
    again_ms, hidden_ms = graph["again_us"] / 1e3, graph["again_hidden_us"] / 1e3
    said = (
        f"Kept for the backward pass at {_place(graph['where'])}: {kept:.1f} of {before:.1f} MB. "
        f"Computed again: {again:.1f} MB in {again_ms:.2f} ms, of which {hidden_ms:.2f} ms run "
        "while the backward pass would wait (predicted)."
    )
    if kept > allowed:
        return (
            f"{said} The budget of {allowed:.1f} MB cannot be met: {kept:.1f} MB is the least "
            "that was found."
        )
    return f"{said} The budget is {allowed:.1f} MB."


def lines_of_named_parts(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each program in which parts that `recompute_modules` names run again."""
    for record in report.get("passes", ()):
        figures = record.get("measures", {})
        if record["pass"] != NAMED or "kept_bytes" not in figures:
            continue
        parts = "; ".join(
            f"{name}, {figures[f'{name}_bytes'] / 1e6:.1f} MB no longer kept, "
            f"{figures[f'{name}_us'] / 1e3:.2f} ms to compute, of which "
            f"{figures[f'{name}_hidden_us'] / 1e3:.2f} ms run while the backward pass would wait"
            for name in record["applied"]
        )
        kept, before = figures["kept_bytes"] / 1e6, figures["kept_bytes_before"] / 1e6
        place = f"at {_place(record['where'])}" if record["where"] else "in a graph without regions"
        yield f"Computed again {place}: {parts}. Kept: {kept:.1f} of {before:.1f} MB (predicted)."


def names_without_effect(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each name of `recompute_modules` that has no effect in any graph."""
    records = [one for one in report.get("passes", ()) if one["pass"] == NAMED]
    acting = {name for one in records for name in one["applied"]}
    left: dict[str, dict[str, None]] = {}
    for verdict in (v for one in records for v in one["skipped"]):
        if verdict["candidate"] not in acting:
            detail = f" ({verdict['detail']})" if verdict["detail"] else ""
            left.setdefault(verdict["candidate"], {})[f"{verdict['reason']}{detail}"] = None
    for name, reasons in left.items():
        yield f"recompute_modules has no effect on {name!r} in any graph: {'; '.join(reasons)}"


def _offloaded(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each program whose tensors `offload_budget` offloads, or leaves, and why."""
    for record in report.get("passes", ()):
        if record["pass"] != "offload_activations":
            continue
        place = f"at {_place(record['where'])}" if record["where"] else "of a graph without regions"
        left = record["skipped"]
        if record["applied"]:
            names = ", ".join(record["applied"])
            others = (
                f"; {len(left)} other tensors stay on the device, and the JSON report says why"
                if left
                else ""
            )
            yield f"In host memory between forward and backward {place}: {names}{others}"
        elif left:
            detail = f" ({left[0]['detail']})" if left[0].get("detail") else ""
            remedy = f"; to do: {left[0]['to_do']}" if left[0].get("to_do") else ""
            yield f"Nothing is offloaded {place}: {left[0]['reason']}{detail}{remedy}"


def _read_alone(report: Mapping[str, Any]) -> Iterator[str]:
    for record in report.get("passes", ()):
        if record["pass"] == "unpack_integers":
            yield from (one["where"] or one["candidate"] for one in record.get("skipped", ()))


def _hidden(graphs: Sequence[Mapping[str, Any]]) -> str:
    """Return a line on the hidden share of all exchanges, "" where there are none."""
    hidden, all_of_it = (sum(g.get(k, 0.0) for g in graphs) for k in ("hidden_us", "exchange_us"))
    if not all_of_it:
        return ""
    return (
        f"Hidden (predicted): {hidden / 1e3:.2f} of {all_of_it / 1e3:.2f} ms of collectives, "
        f"{hidden / all_of_it:.0%}, each graph run once."
    )


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
            str(region["num_chunks"]) if region["num_chunks"] > 1 else "-",
            str(region["num_host_reads"]),
            _entry(region, _verdict(region, report["graphs"])),
        )
    return table


def _verdict(region: Mapping[str, Any], graphs: Sequence[Mapping[str, Any]]) -> str:
    """Return the verdict; for a region left whole, the hidden time of its graphs' exchanges."""
    if region["verdict"] != "left whole":
        return str(region["verdict"])
    own = {g["phase"]: g for g in graphs if g["where"] == region.get("graph")}
    timed = [g for g in own.values() if "hidden_us" in g]
    if not timed:
        return "whole"
    hidden, all_of_it = (sum(g[key] for g in timed) / 1e3 for key in ("hidden_us", "exchange_us"))
    return f"whole, scheduled: {hidden:.2f} of {all_of_it:.2f} ms hidden (predicted)"


def _attention(report: Mapping[str, Any]) -> Table:
    table = Table(title="Attention", box=SIMPLE_HEAD)
    table.add_column("where", no_wrap=True)
    for heading in ("ranks", "local\nheads", "local\nKV heads", "chunks"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    rows: Counter[tuple[str, ...]] = Counter()
    for found in report["attention"]:
        keys = ("num_ranks", "num_heads", "num_kv_heads", "num_chunks")
        figures = (str(found[key]) if found["is_region"] else "-" for key in keys)
        rows[_place(found["where"]), *figures, _entry(found, found["verdict"])] += 1
    for (*cells, verdict), number in rows.items():
        table.add_row(*cells, verdict + (f" ({number} times)" if number > 1 else ""))
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
    if len(report["graphs"]) > 1:
        table.add_section()
        table.add_row("all", "", *_totals(report["graphs"]))
    return table


def _slowdowns(report: Mapping[str, Any]) -> str:
    """Return a line on how compute and collectives slow each other in the times of the graphs."""
    by_collectives, by_compute = (
        max(graph.get(key, 0.0) for graph in report["graphs"])
        for key in ("contention", "overlap_slowdown")
    )
    return (
        f"These times assume that compute is up to {by_collectives:.0%} slower while a "
        f"collective runs than alone, and a collective up to {by_compute:.0%} slower while "
        "compute runs."
    )


def _entry(found: Mapping[str, Any], verdict: str) -> str:
    """Return the verdict, remarks and remedies, a line each."""
    changes = found.get("to_do", ())  # none in reports of earlier versions
    return "\n".join([verdict, *found["remarks"], *changes])


def _totals(graphs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the cells below a table of graphs; peaks are not reached at once, and have no sum."""
    launches = sum(len(order) for graph in graphs for order in graph["launches"].values())
    keys = ("compute_us", "exchange_us", "hidden_us", "exposed_us_before", "exposed_us")
    total = {key: sum(graph.get(key, 0.0) for graph in graphs) for key in keys}
    times = (_scaled(total[key], 1e3) for key in keys[:3])
    return (str(launches), *times, _change(total, "exposed_us", 1e3), "")


def _place(where: str) -> str:
    """Return `file.py:line` of `file.py:line in function`."""
    return where.partition(" in ")[0]


def _scaled(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.2f}"


def _change(graph: Mapping[str, Any], key: str, unit: float) -> str:
    return f"{_scaled(graph.get(key + '_before'), unit)} -> {_scaled(graph.get(key), unit)}"
