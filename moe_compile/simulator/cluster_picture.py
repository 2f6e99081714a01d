"""Predicted timelines of one layer as a picture; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from moe_compile.report.timeline_picture import Bar, Row, draw_rows
from moe_compile.simulator.cluster_timeline import (
    BACKWARD,
    EXCHANGES,
    FORWARD,
    INSIDE,
    WEIGHTS,
    kind_of,
    placed_spans,
    streams_of,
)
from moe_compile.simulator.layer_tasks import LayerTime

COLOURS: Final = {
    FORWARD: "#1f5fa8",
    BACKWARD: "#7fa6d6",
    WEIGHTS: "#c9daee",
    EXCHANGES: "#c2410c",
    INSIDE: "#f2b78d",
}
US_PER_MS: Final = 1e3
AXIS: Final = "milliseconds, predicted by formulas; forward then backward"


def draw_timelines(layers: Mapping[str, LayerTime], title: str, path: Path) -> None:
    """Write a PNG: one row per schedule, compute above communication, hop 2 below both."""
    rows = [_row(name, layer) for name, layer in layers.items()]
    draw_rows(rows, COLOURS, title, AXIS, path)


def _row(name: str, layer: LayerTime) -> Row:
    streams = streams_of(layer)
    bars = [
        Bar(
            label=span.name,
            kind=kind_of(span),
            lane=streams.index(span.stream),
            start=span.start_us / US_PER_MS,
            length=(span.end_us - span.start_us) / US_PER_MS,
        )
        for span in placed_spans(layer)
    ]
    return Row(title=f"{name}: {layer.total_us / US_PER_MS:.2f} ms", lanes=streams, bars=bars)
