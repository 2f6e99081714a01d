"""Timelines as a picture; needs matplotlib.

Contract
    A bar has its label, cut where there is no room for all of it, in black or white, whichever can
    be read on the bar. A bar that is narrower than a letter has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch

from moe_compile.report.timelines import GraphTimeline, Run, timelines_of
from moe_compile.schedule.timeline_data import KINDS

COLOURS: Final = ("#1f5fa8", "#a9c9ec", "#c2410c", "#d5d9df")
"""Colours of the kinds of a report."""
INCHES: Final = (14.0, 0.7, 0.5)
"""Width of the picture, height of one lane, height of a row's title and gap."""
FONT: Final = 7.5
"""Size of labels in points."""
GAP: Final = 4.0
"""Pixels that a label is shorter than its bar."""
LEAST: Final = 4
"""Letters that must be left of a label that is cut."""
MOST_GRAPHS: Final = 4
"""Graphs in a picture; those of further blocks are alike."""
MS: Final = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One task on one lane; times in milliseconds."""

    label: str
    kind: str
    lane: int
    start: float
    length: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One timeline."""

    title: str
    lanes: Sequence[str]
    """Names of streams, the upper first."""
    bars: Sequence[Bar]


def draw_rows(
    rows: Sequence[Row], colours: Mapping[str, str], title: str, axis: str, path: Path
) -> None:
    """Write a PNG of the rows on one axis of time; `colours` are by kind."""
    heights = [INCHES[1] * len(row.lanes) for row in rows]
    size = (INCHES[0], sum(heights) + INCHES[2] * len(rows) + 0.9)
    figure, axes = pyplot.subplots(
        len(rows), 1, figsize=size, sharex=True, squeeze=False, height_ratios=heights
    )
    longest = max((b.start + b.length for row in rows for b in row.bars), default=1.0)
    drawn = [_draw(one, row, colours, longest) for one, row in zip(axes[:, 0], rows, strict=True)]
    axes[-1, 0].set_xlabel(axis, fontsize=9)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    used = {bar.kind for row in rows for bar in row.bars}
    patches = [Patch(color=c, label=kind) for kind, c in colours.items() if kind in used]
    figure.legend(handles=patches, loc="upper right", ncols=len(patches), fontsize=9)
    figure.tight_layout()
    for one, row, bars in zip(axes[:, 0], rows, drawn, strict=True):
        for bar, patch in zip(row.bars, bars, strict=True):
            _label(one, bar, patch, colours[bar.kind])
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(axis: Any, row: Row, colours: Mapping[str, str], longest: float) -> list[Any]:
    axis.set_title(row.title, fontsize=9, loc="left")
    axis.set_yticks(range(len(row.lanes)), reversed(row.lanes), fontsize=8)
    axis.set_xlim(0.0, longest)
    axis.set_ylim(-0.5, len(row.lanes) - 0.5)
    axis.tick_params(axis="x", labelsize=8)
    return [
        axis.barh(
            len(row.lanes) - 1 - bar.lane,
            bar.length,
            left=bar.start,
            height=0.86,
            color=colours[bar.kind],
            edgecolor="white",
            linewidth=0.5,
        )[0]
        for bar in row.bars
    ]


def _label(axis: Any, bar: Bar, patch: Any, colour: str) -> None:
    """Write a bar's label into it: whole or in two lines, across or upright, or cut."""
    box = patch.get_window_extent()
    if box.width < FONT:
        return
    middle = patch.get_x() + patch.get_width() / 2, patch.get_y() + patch.get_height() / 2
    text = axis.text(
        *middle, bar.label, ha="center", va="center", fontsize=FONT, color=_on(colour), clip_on=True
    )
    letter = text.get_window_extent().width / max(1, len(bar.label))
    rooms = {0: box.width, 90: box.height}
    for angle, label in _labels(bar.label, rooms, letter):
        text.set(rotation=angle, text=label)
        taken = text.get_window_extent()
        along = taken.height if angle else taken.width
        if along + GAP <= rooms[angle] and taken.width <= box.width and taken.height <= box.height:
            return
    text.remove()


def _labels(label: str, rooms: Mapping[int, float], letter: float) -> list[tuple[int, str]]:
    """Return the ways to write a label, by angle: whole, in two lines, then cut, longest first."""
    whole = [(angle, text) for angle in rooms for text in (label, label.replace(" ", "\n", 1))]
    cut = [
        (angle, f"{label[:number]}…")
        for angle, room in rooms.items()
        for number in range(LEAST, min(len(label), int((room - GAP) / letter)))
    ]
    return [*whole, *sorted(cut, key=lambda way: len(way[1]), reverse=True)]


def _on(colour: str) -> str:
    """Return black or white, whichever can be read on a colour: WCAG's relative luminance."""
    red, green, blue = matplotlib.colors.to_rgb(colour)
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "black" if (luminance + 0.05) ** 2 > 0.0525 else "white"


def draw_report(report: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of the first graphs of a report, each before and after."""
    found = timelines_of(report)
    shown = [one for one in found if one.is_rewritten][:MOST_GRAPHS] or found[:MOST_GRAPHS]
    rows = [_row(graph, run) for graph in shown for run in dict.fromkeys(_ends(graph))]
    of_all = f", {len(shown)} of {len(found)} graphs" if len(shown) < len(found) else ""
    title = f"Timelines predicted for hardware profile {report['hardware']!r}{of_all}"
    draw_rows(rows, dict(zip(KINDS, COLOURS, strict=True)), title, "milliseconds", path)


def _ends(graph: GraphTimeline) -> tuple[str, str]:
    return graph.runs[0].name, graph.runs[-1].name


def _row(graph: GraphTimeline, name: str) -> Row:
    run = graph.run(name)
    assert run is not None
    lanes = run.streams()
    return Row(
        title=f"{graph.title}; {run.title}: {run.step_us / MS:.2f} ms, of it "
        f"{run.exposed_us / MS:.2f} ms exposed",
        lanes=lanes,
        bars=[_bar(run, span, lanes) for span in run.spans],
    )


def _bar(run: Run, span: Sequence[Any], lanes: Sequence[str]) -> Bar:
    return Bar(
        label=run.label_of(span),
        kind=run.kind_of(span),
        lane=lanes.index(span[1]),
        start=span[2] / MS,
        length=span[3] / MS,
    )
