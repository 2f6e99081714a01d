"""Spans of streams as a trace for Perfetto or chrome://tracing.

Contract
    One process per timeline, one thread per stream; times in microseconds. Loading it needs
    nothing of megamoe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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
