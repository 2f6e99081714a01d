"""The bars of the benchmark of recomputation, on curves whose verdicts are known."""

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.recompute.__main__ import Curve, Point, draw, verdicts

PAGE = Path(__file__).parents[2] / "docs/memory.md"
HEAD = "| block | by price: kept | added time | torch's solver: kept | added time |"
RECORDED = Path(__file__).parents[2] / "benchmarks/results/recompute.json"
THEIRS = Point(cell="a", budget=0.5, kept=0.6, added=0.02, prices="theirs")
OURS = replace(THEIRS, budget=0.6, kept=0.55, added=0.01, prices="ours")
BAR = replace(OURS, budget=0.55, added=0.009)
MET = Curve(cell="a", kept_bytes=1, step_us=1.0, torchs=(THEIRS,), ours=(OURS, BAR), choice_s=1.0)


def met(*curves):
    return [is_met for _, is_met, _ in verdicts(curves)]


def test_each_bar_fails_by_itself():
    assert met(MET) == [True, True, True]
    assert met(replace(MET, ours=(OURS, replace(BAR, added=0.011)))) == [False, True, True]
    assert met(replace(MET, ours=(OURS, replace(BAR, kept=0.56)))) == [False, True, True]
    slower = replace(OURS, added=0.021)
    assert met(replace(MET, ours=(slower, BAR))) == [True, False, False]
    assert met(replace(MET, ours=(replace(OURS, kept=0.61), BAR))) == [True, False, True]
    assert met(replace(MET, ours=(replace(OURS, added=0.019), BAR))) == [True, True, False]


def test_a_gain_is_needed_on_each_block():
    other = replace(MET, cell="b", ours=(replace(OURS, cell="b", added=0.019), BAR))
    assert met(MET, replace(MET, cell="b")) == [True, True, True]
    assert met(MET, other) == [True, True, False]


def recorded_curves(found):
    return [
        Curve(
            **{
                **one,
                "torchs": tuple(Point(**point) for point in one["torchs"]),
                "ours": tuple(Point(**point) for point in one["ours"]),
            }
        )
        for one in found["curves"]
    ]


def test_the_recorded_bars_are_those_of_the_recorded_points():
    found = json.loads(RECORDED.read_text())
    curves = recorded_curves(found)
    assert [[bar, is_met] for bar, is_met, _ in verdicts(curves)] == found["bars"]


def row(theirs, ours):
    """Return the row of the page on memory for a budget that torch's solver left."""
    model, ranks, machine = ours.cell.split(", ")
    name = {"mixtral-8x7b": "Mixtral-8x7B", "deepseek-v3": "DeepSeek-V3"}[model]
    shares = f"{ours.kept:.0%} | {ours.added:.2%} | {theirs.kept:.0%} | {theirs.added:.2%}"
    return f"| {name}, {ranks}, {machine.upper()} | {shares.replace('%', ' %')} |"


def test_the_page_on_memory_has_the_recorded_points():
    curves = recorded_curves(json.loads(RECORDED.read_text()))
    pairs = [pair for c in curves for pair in zip(c.torchs, c.ours, strict=False)]
    expected = dict.fromkeys(row(*pair) for pair in pairs)
    lines = PAGE.read_text().splitlines()
    begin = lines.index(HEAD) + 2
    assert lines[begin : begin + len(expected)] == [*expected]
    assert not lines[begin + len(expected)]


def test_the_picture_has_a_panel_for_each_block(tmp_path):
    widths = []
    for curves in ([MET], [MET, MET]):
        draw(curves, tmp_path / "curves.png")
        drawn = (tmp_path / "curves.png").read_bytes()
        assert drawn.startswith(b"\x89PNG")
        widths.append(int.from_bytes(drawn[16:20], "big"))
    assert widths[1] == 2 * widths[0]
