"""The report as one page: timelines, collectives with what to change, graphs step by step, memory.

Contract
    The page is one HTML file: it loads nothing and sends nothing. Text of the model, as names of
    files and functions, is shown as text whatever is in it.
    It is made of the JSON report alone. What the report does not have, the page says it lacks.
    A gain is the cost model's: predicted where it has a price for the remedy; at most the time that
    the collectives are alone, where the remedy is a change of code; else "not predicted", and why.
    Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moe_compile.journal.reasons import Reason
from moe_compile.journal.remedies import REMEDIES
from moe_compile.report.explanation_text import (
    NOTHING_DONE,
    NOTHING_SEEN,
    ONE_GRAPH,
    headline,
    why_nothing_was_rewritten,
)
from moe_compile.report.timelines import GraphTimeline, Run, timelines_of, trace_of
from moe_compile.schedule.timeline_data import unpacked

TEMPLATE: Final = Path(__file__).with_name("page.html")
DATA: Final = '"the data of the page"'
"""What the template has in place of the data."""
PAGE: Final = ".html"
"""End of the name of a page; a report with such a path is written as a page."""
TRACE: Final = ".trace.json"
"""End of the name of the trace beside a page."""


def write_page(report: Mapping[str, Any], path: Path) -> None:
    """Write the page of a report to `path`, and the trace beside it, each file whole."""
    trace = path.with_suffix(TRACE)
    write_whole(trace, json.dumps(trace_of(report)))
    write_whole(path, page_of(report, trace.name))


def json_of(report: Path) -> Path:
    """Return the path of the JSON of a report: beside the page, where the path is of a page."""
    return report.with_suffix(".json") if report.suffix == PAGE else report


def write_whole(path: Path, text: str) -> None:
    """Replace a file, so that a reader never sees half of it; make its folder."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def page_of(report: Mapping[str, Any], trace: str = "") -> str:
    """Return the page; `trace` is the name of the trace beside it."""
    data = json.dumps({**page_data(report), "trace": trace}, separators=(",", ":"))
    safe = data.replace("<", "\\u003c")  # no tag in a text ends the script element
    return TEMPLATE.read_text().replace(DATA, safe)


def _without_times(report: Mapping[str, Any]) -> str:
    """Return the first line of a page on a program none of whose graphs has predicted times."""
    if why_nothing_was_rewritten(report):
        return "megamoe: nothing is rewritten"
    return "megamoe: rewritten, without predicted times"


def page_data(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of the page."""
    graphs = timelines_of(report)
    breaks = list(report.get("graph_breaks", ()))
    exchanges = [
        {**one, "gain": _gain_of_exchange(one, report, graphs)} for one in report["exchanges"]
    ]
    notes = ("warnings", "rewrites", "dropped_passes", "regions_not_found")
    return {
        "headline": headline(report) or _without_times(report),
        "times": _times(graphs),
        "hardware": report["hardware"],
        "versions": report["versions"],
        "exchanges": exchanges,
        "nothing": "" if exchanges else f"{NOTHING_SEEN}. To do: {NOTHING_DONE}",
        "regions": [_region(one) for one in report["regions"]],
        "breaks": breaks,
        "break_remedy": ONE_GRAPH if breaks else "",
        "notes": [line for name in notes for line in report.get(name, ())],
        "choices": list(report.get("choices", ())),
        "graphs": [_graph(graph, report) for graph in graphs],
        "no_timelines": "" if graphs else _why_no_timelines(report),
        "texts": unpacked(report["graph_texts"]) if report.get("graph_texts") else [],
        "no_texts": "" if report.get("graph_texts") else _why_no_texts(),
    }


def _times(graphs: Sequence[GraphTimeline]) -> str:
    """Return the predicted time of all graphs, each run once, before and after; "" without any."""
    rewritten = [graph for graph in graphs if graph.is_rewritten]
    if not rewritten:
        return ""
    before, now = (sum(graph.runs[at].step_us for graph in rewritten) for at in (0, -1))
    named = rewritten[0].runs[0].title
    return (
        f"Predicted time of these graphs, each run once: {_ms(before)} ({named}), {_ms(now)} now, "
        f"{now / before - 1.0:+.1%}."
    )


def _region(region: Mapping[str, Any]) -> dict[str, Any]:
    said = [*region["remarks"], *region["to_do"]]
    keys = ("where", "verdict", "num_chunks", "num_local_experts", "num_ranks", "num_host_reads")
    return {**{key: region[key] for key in keys}, "said": said}


def _why_no_timelines(report: Mapping[str, Any]) -> str:
    if any(graph["launches"] for graph in report["graphs"]):
        return (
            "The timelines of these graphs are not known: megamoe.schedule is off, or their code "
            "comes from a cache without them."
        )
    return "No graph with collectives could be timed."


def _why_no_texts() -> str:
    return (
        "This report has no text of graphs: a job keeps them where megamoe.report ends in .html. "
        "moe_compile.explain(model, *inputs).html(path) and `megamoe explain JOB.toml --html PATH` "
        "have them."
    )


def _graph(graph: GraphTimeline, report: Mapping[str, Any]) -> dict[str, Any]:
    exchanges = {one["where"]: one for one in report["exchanges"]}
    return {
        "title": graph.title,
        "where": graph.where,
        "phase": graph.phase,
        "runs": [_run(run) for run in graph.runs],
        "launches": [_launch(launch, graph, exchanges) for launch in graph.launches],
    }


def _run(run: Run) -> dict[str, Any]:
    streams = run.streams()
    return {
        "title": run.title,
        "name": run.name,
        "streams": streams,
        "nodes": run.nodes,
        "spans": [
            [span[0], streams.index(span[1]), *span[2:], run.kind_of(span), run.label_of(span)]
            for span in run.spans
        ],
        "memory": run.memory,
        "step_us": run.step_us,
        "exposed_us": run.exposed_us,
        "peak_bytes": run.peak_bytes,
    }


def _launch(
    launch: Mapping[str, Any], graph: GraphTimeline, exchanges: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    name, operator, where, _ = launch["node"]
    last = graph.runs[-1]
    us, alone_us = last.alone_us().get(name, (0.0, 0.0))
    places = [where, *(one["node"][2] for one in graph.launches if _is_of_one(one, launch))]
    exchange = next((exchanges[place] for place in places if place in exchanges), {})
    reason = Reason[launch["reason"]] if launch["reason"] else None
    change = REMEDIES[reason] if reason else exchange.get("change", "")
    return {
        "name": name,
        "operator": operator.rpartition("::")[2],
        "where": where,
        "stream": launch["stream"],
        "bytes": launch["bytes"],
        "us": us,
        "alone_us": alone_us,
        "verdict": _verdict(launch, graph, reason),
        "exchange": exchange.get("what") or exchange.get("because", ""),
        "change": change,
        "gain": _gain_of_launch(reason, alone_us, graph) if _asks(change) else "",
    }


def _is_of_one(launch: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two launches are of one region."""
    return bool(launch["region"]) and launch["region"] == other["region"]


def _asks(change: str) -> bool:
    """Whether a remedy asks for a change: not if it begins with "nothing"."""
    return bool(change) and not change.startswith("nothing")


def _verdict(launch: Mapping[str, Any], graph: GraphTimeline, reason: Reason | None) -> str:
    if not graph.is_rewritten:
        return "left where the program launches it: nothing in its graph is rewritten"
    if launch["is_moved"]:
        return "moved: it now runs beside other compute than before"
    return reason.said(launch["detail"]) if reason else ""


def _gain_of_launch(reason: Reason | None, alone_us: float, graph: GraphTimeline) -> str:
    if reason is Reason.MEMORY_CAP and graph.uncapped_us is not None:
        gain = graph.runs[-1].step_us - graph.uncapped_us
        return f"{_ms(gain)} of this graph, if memory allows the fastest order"
    return _at_most(alone_us, 1)


def _at_most(alone_us: float, number: int) -> str:
    if not alone_us:
        return "nothing: it already runs under compute"
    they = "it runs" if number == 1 else f"these {number} collectives run"
    return f"at most {_ms(alone_us)}, the time in which {they} alone now"


def _gain_of_exchange(
    exchange: Mapping[str, Any], report: Mapping[str, Any], graphs: Sequence[GraphTimeline]
) -> str:
    """Return what the remedy of an exchange gains, "" where there is nothing to change."""
    if advice := _advice(exchange["where"], report):
        return advice
    if not _asks(exchange["change"]):
        return ""
    alone = list(_alone_at(exchange["where"], graphs))
    if alone:
        return _at_most(sum(alone), len(alone))
    if not graphs:
        return "not predicted: no graph could be timed"
    return "not predicted: the exchange is in no graph that could be timed"


def _advice(where: str, report: Mapping[str, Any]) -> str:
    """Return the planner's price of the fastest way that options do not allow."""
    for region in report["regions"]:
        advice = region["decision"].get("advice", ())
        if region["where"] == where and advice:
            fastest = min(advice, key=lambda one: one["predicted_us"])
            gain = region["decision"]["predicted_us"] - fastest["predicted_us"]
            is_lossy = fastest["is_lossy"]
            why = "it changes bits" if is_lossy else "the options ask for a different rewrite"
            return f"{_ms(gain)} by {fastest['candidate']}, not chosen because {why}"
    return ""


def _alone_at(where: str, graphs: Sequence[GraphTimeline]) -> Iterator[float]:
    """Yield the time that each collective of a line, or of its region, is alone, both ways."""
    for graph in graphs:
        alone = graph.runs[-1].alone_us()
        own = [launch for launch in graph.launches if launch["node"][2] == where]
        for launch in graph.launches:
            if launch in own or any(_is_of_one(launch, one) for one in own):
                yield alone.get(launch["node"][0], (0.0, 0.0))[1]


def _ms(us: float) -> str:
    return f"{us / 1e3:.3f} ms"
