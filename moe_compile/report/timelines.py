"""The timelines of a report, graph by graph: for the page, the trace and the picture.

Contract
    Reads JSON data of `moe_compile.report.process_report`, of a job or of `explain`.
    A graph has its runs in this order, as far as the report has them: the program as written, the
    rewritten graph in its own order, and the same graph as it runs.
    A collective is alone while the compute stream stands still.
    A trace, for Perfetto or chrome://tracing, has one process per timeline and one thread per
    stream; times in microseconds. Loading it needs nothing of megamoe.
    Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from moe_compile.schedule.timeline_data import (
    AFTER,
    AS_WRITTEN,
    BEFORE,
    ON_COMPUTE,
    ON_HOST,
    ON_LINK,
    OTHER,
    unpacked,
)

TITLES: Final[Mapping[str, str]] = {
    AS_WRITTEN: "your program as it is written",
    BEFORE: "the rewritten graph in its own order",
    AFTER: "as megamoe runs it",
}
LEGEND: Final = (
    "Times are predicted from a hardware profile. Streams: the host, which launches; compute; the "
    "link of each process group. Where a row is empty its stream waits."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedSpan:
    """One task on one stream."""

    name: str
    kind: str
    stream: int
    """Index of the stream in its process."""
    start_us: float
    us: float
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What a viewer shows of the task beside its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedProcess:
    """One timeline: its name, streams and spans."""

    name: str
    streams: Sequence[str]
    spans: Sequence[TracedSpan]
    """In any order."""


def chrome_trace(processes: Sequence[TracedProcess], legend: str) -> dict[str, Any]:
    """Return the trace of several timelines, in the trace event format."""
    events: list[dict[str, Any]] = []
    for number, process in enumerate(processes):
        events.append(_name("process_name", number, 0, process.name))
        for thread, stream in enumerate(process.streams):
            events.append(_name("thread_name", number, thread, stream))
        events.extend(_event(span, number) for span in process.spans)
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"legend": legend}}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _event(span: TracedSpan, process: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": process,
        "tid": span.stream,
        "ts": span.start_us,
        "dur": span.us,
        "args": dict(span.notes),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One order of a graph's nodes; times in microseconds."""

    name: str
    nodes: Sequence[Sequence[str]]
    """Name, operator, line and kind of each node."""
    spans: Sequence[Sequence[Any]]
    """Node, stream, start, length."""
    memory: Sequence[Sequence[Any]]
    """Time, live bytes, node."""
    step_us: float
    exposed_us: float
    peak_bytes: int
    waits: Sequence[Sequence[Any]] = ()
    """Launch, and how long compute stands at a wait for it; none in reports of earlier versions."""

    @property
    def title(self) -> str:
        """Return what the order is, in words."""
        return TITLES[self.name]

    def streams(self) -> list[str]:
        """Return the names of streams, the host first, then compute."""
        first = (ON_HOST, ON_COMPUTE)
        used = {span[1] for span in self.spans}
        return [*(s for s in first if s in used), *sorted(used - set(first))]

    def kind_of(self, span: Sequence[Any]) -> str:
        """Return the kind of a span, one of `schedule/timeline_data.py: KINDS`."""
        if span[1] == ON_HOST:
            return ON_HOST
        kind = str(self.nodes[span[0]][3])
        return OTHER if kind == ON_LINK and span[1] == ON_COMPUTE else kind

    def label_of(self, span: Sequence[Any]) -> str:
        """Return the operator of a span's node; of a collective its line as well."""
        _, operator, where, _ = self.nodes[span[0]]
        name = operator.rpartition("::")[2].strip("_").removesuffix("_single")
        name = name.removesuffix("_into_tensor").removesuffix("_tensor")
        place = where.partition(" in ")[0]
        return f"{name} {place}" if self.kind_of(span) == ON_LINK and place else name

    def waited_us(self) -> dict[str, float]:
        """Return, by name of a collective's node, how long compute stands at the waits for it."""
        found: dict[str, float] = {}
        for row, us in self.waits:
            name = self.nodes[row][0]
            found[name] = found.get(name, 0.0) + us
        return found

    def alone_us(self) -> dict[str, tuple[float, float]]:
        """Return, by name of a collective's node, its time and the part of it that it is alone."""
        busy = [(s[2], s[2] + s[3]) for s in self.spans if s[1] == ON_COMPUTE]
        return {
            self.nodes[span[0]][0]: (span[3], _alone(span[2], span[2] + span[3], busy))
            for span in self.spans
            if self.kind_of(span) == ON_LINK
        }


def _alone(start: float, end: float, busy: Sequence[tuple[float, float]]) -> float:
    """Return how much of start to end the disjoint intervals `busy` leave free."""
    covered = sum(max(0.0, min(end, e) - max(start, s)) for s, e in busy)
    alone = round(end - start - covered, 1)
    return max(0.0, alone)  # spans are rounded: parts of a tenth of a microsecond are none


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphTimeline:
    """The runs of one graph."""

    where: str
    phase: str
    runs: Sequence[Run]
    launches: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    """Collectives of the last run, as `schedule/timeline.py` has them."""
    uncapped_us: float | None = None
    """Time of the fastest order, where memory forbids it."""

    @property
    def title(self) -> str:
        """Return the phase, and the place where it is known."""
        return f"{self.phase} at {self.where}" if self.where else f"{self.phase}, line unknown"

    @property
    def is_rewritten(self) -> bool:
        """Whether megamoe gave the graph its order."""
        return self.runs[-1].name == AFTER

    def run(self, name: str) -> Run | None:
        """Return the run of that name."""
        return next((run for run in self.runs if run.name == name), None)


def timelines_of(report: Mapping[str, Any]) -> list[GraphTimeline]:
    """Return the timeline of each graph with collectives; equal graphs have one for all."""
    written = {(g["where"], g["phase"]): g["timeline"] for g in report.get("as_written", ())}
    ours = {
        (g["where"], g["phase"], g["timeline"]): g["timeline"]
        for g in report["graphs"]
        if g.get("timeline")
    }
    known = {key[:2] for key in ours}
    others = {(*key, ""): "" for key in written if key not in known}
    found = {**ours, **others}
    graphs = [_timeline(*key[:2], written.get(key[:2], ""), now) for key, now in found.items()]
    return [graph for graph in graphs if graph.launches]


def _timeline(where: str, phase: str, written: str, now: str) -> GraphTimeline:
    before = unpacked(written) if written else {}
    after = unpacked(now) if now else {}
    last = after or before
    return GraphTimeline(
        where=where,
        phase=phase,
        runs=[*_runs(before), *_runs(after)],
        launches=[{**launch, "node": last["nodes"][launch["node"]]} for launch in last["launches"]],
        uncapped_us=after.get("uncapped_us"),
    )


def _runs(data: Mapping[str, Any]) -> Iterator[Run]:
    for name, run in data.get("runs", {}).items():
        yield Run(name=name, nodes=data["nodes"], **run)


def trace_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return all runs of all graphs in the trace event format."""
    graphs = timelines_of(report)
    return chrome_trace([_process(g, run) for g in graphs for run in g.runs], LEGEND)


def _process(graph: GraphTimeline, run: Run) -> TracedProcess:
    streams = run.streams()
    spans = []
    for span in run.spans:
        name, operator, where, _ = run.nodes[span[0]]
        spans.append(
            TracedSpan(
                name=run.label_of(span),
                kind=run.kind_of(span),
                stream=streams.index(span[1]),
                start_us=span[2],
                us=span[3],
                notes={"node": name, "operator": operator, "line": where},
            )
        )
    return TracedProcess(name=f"{graph.title}, {run.title}", streams=streams, spans=spans)
