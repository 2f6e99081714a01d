"""The bars of the benchmark of recomputation, on curves whose verdicts are known."""

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.recompute.__main__ import Curve, Point, verdicts

RECORDED = Path(__file__).parents[2] / "benchmarks/results/recompute.json"
THEIRS = Point(cell="a", budget=0.5, kept=0.6, added=0.02, prices="theirs")
OURS = replace(THEIRS, kept=0.55, added=0.01, prices="ours")
BAR = replace(OURS, added=0.009)
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


def test_the_recorded_bars_are_those_of_the_recorded_points():
    found = json.loads(RECORDED.read_text())
    curves = [
        Curve(
            **{
                **one,
                "torchs": tuple(Point(**point) for point in one["torchs"]),
                "ours": tuple(Point(**point) for point in one["ours"]),
            }
        )
        for one in found["curves"]
    ]
    assert [[bar, is_met] for bar, is_met, _ in verdicts(curves)] == found["bars"]
