"""Predicted timelines of one layer as a trace for Perfetto or chrome://tracing.

Contract
    One process per schedule, one thread per stream; times in microseconds, backward after
    forward. Loading it needs nothing of megamoe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from moe_compile.cost.tasks import COMPUTE, NODE_LINK, STREAMS, Span
from moe_compile.report.timelines import TracedProcess, TracedSpan, chrome_trace
from moe_compile.simulator.layer_tasks import LayerTime

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
WEIGHTS: Final = "weight gradients"
EXCHANGES: Final = "communication"
INSIDE: Final = NODE_LINK
LEGEND: Final = (
    f"Each timeline has two rows: compute ({FORWARD}; {BACKWARD}, whose names end in '; {WEIGHTS}, "
    f"dW) and {EXCHANGES}; with two hops it has a third row, {INSIDE}, for hop 2. An empty stretch "
    "of a row means that its stream waits."
)


def kind_of(span: Span) -> str:
    """Return the legend's kind of a span."""
    if span.stream != COMPUTE:
        return INSIDE if span.stream == NODE_LINK else EXCHANGES
    if "dW" in span.name:
        return WEIGHTS
    return BACKWARD if "'" in span.name else FORWARD


def placed_spans(layer: LayerTime) -> Iterator[Span]:
    """Return all spans on one axis: phases one after another."""
    offset = 0.0
    for phase in layer.phases:
        for span in phase.spans:
            yield Span(
                name=span.name,
                stream=span.stream,
                start_us=span.start_us + offset,
                end_us=span.end_us + offset,
            )
        offset += phase.total_us


def streams_of(layer: LayerTime) -> tuple[str, ...]:
    """Return the streams of a schedule: the node's link is one in two hops."""
    used = {span.stream for phase in layer.phases for span in phase.spans}
    return tuple(stream for stream in STREAMS if stream != NODE_LINK or stream in used)


def layer_trace(layers: Mapping[str, LayerTime]) -> dict[str, Any]:
    """Return the trace of each schedule by name, in the trace event format."""
    processes = [
        TracedProcess(
            name=f"{schedule} (predicted)",
            streams=streams_of(layer),
            spans=[*map(_traced, placed_spans(layer))],
        )
        for schedule, layer in layers.items()
    ]
    return chrome_trace(processes, LEGEND)


def _traced(span: Span) -> TracedSpan:
    return TracedSpan(
        name=span.name,
        kind=kind_of(span),
        stream=STREAMS.index(span.stream),
        start_us=span.start_us,
        us=span.end_us - span.start_us,
    )
