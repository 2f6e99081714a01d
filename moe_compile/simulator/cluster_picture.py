"""Predicted timelines of one layer as a picture; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch

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
    FORWARD: "#4472b0",
    BACKWARD: "#7fa6d6",
    WEIGHTS: "#b9cde5",
    EXCHANGES: "#e07b39",
    INSIDE: "#f2b78d",
}
SMALLEST_LABEL: Final = 0.045
"""Share of the axis below which a span has no room for its name."""
INCHES: Final = (14.0, 1.15)
"""Width of the picture, height of one schedule."""
US_PER_MS: Final = 1e3


def draw_timelines(layers: Mapping[str, LayerTime], title: str, path: Path) -> None:
    """Write a PNG: one row per schedule, compute above communication, hop 2 below both."""
    figure, axes = pyplot.subplots(
        len(layers), 1, figsize=(INCHES[0], INCHES[1] * len(layers) + 1.0), sharex=True
    )
    longest = max(layer.total_us for layer in layers.values()) / US_PER_MS
    rows = [axes] if len(layers) == 1 else list(axes)
    for axis, (name, layer) in zip(rows, layers.items(), strict=True):
        _draw(axis, layer, longest)
        axis.set_title(f"{name}: {layer.total_us / US_PER_MS:.2f} ms", fontsize=9, loc="left")
    rows[-1].set_xlabel("milliseconds, predicted by formulas; forward then backward")
    figure.suptitle(title, fontsize=11)
    patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="upper right", ncols=len(patches), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(axis: Any, layer: LayerTime, longest_ms: float) -> None:
    streams = streams_of(layer)
    for span in placed_spans(layer):
        start, width = span.start_us / US_PER_MS, (span.end_us - span.start_us) / US_PER_MS
        colour = COLOURS[kind_of(span)]
        lane = len(streams) - 1 - streams.index(span.stream)
        axis.barh(
            lane, width, left=start, height=0.8, color=colour, edgecolor="white", linewidth=0.5
        )
        if width > SMALLEST_LABEL * longest_ms:
            axis.text(start + width / 2, lane, span.name, ha="center", va="center", fontsize=6)
    axis.set_yticks(range(len(streams)), reversed(streams), fontsize=7)
    axis.set_xlim(0.0, longest_ms)
    axis.set_ylim(-0.5, len(streams) - 0.5)
