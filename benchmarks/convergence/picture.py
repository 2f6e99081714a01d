"""The picture of the comparison: losses above, differences from bf16 below, a column per model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
import numpy
from matplotlib import pyplot

from benchmarks.convergence.compare import LAST, Losses

SMOOTH: Final = numpy.ones(LAST) / LAST


def draw(losses: Mapping[str, Mapping[str, Losses]], baseline: str, path: Path) -> None:
    """Draw losses by title of a model and name of a way; lines are means over seeds.

    Differences are running means of `LAST` steps. Bands reach one standard deviation over seeds to
    either side; they are left out of the losses, where one hides the other.
    """
    size = (6.0 * len(losses), 8.0)
    figure, axes = pyplot.subplots(2, len(losses), figsize=size, squeeze=False)
    for column, (title, by_way) in enumerate(losses.items()):
        whole, below = axes[0, column], axes[1, column]
        base = _by_seed(by_way[baseline])
        for number, (way, runs) in enumerate(by_way.items()):
            colour, found = f"C{number}", _by_seed(runs)
            steps = numpy.arange(1, found.shape[1] + 1)
            _line(whole, steps, found, colour, way, has_band=way == baseline)
            if way != baseline:
                gap = [numpy.convolve(one, SMOOTH, mode="valid") for one in found - base]
                _line(below, steps[LAST - 1 :], numpy.array(gap), colour, way, has_band=True)
        whole.set(xlabel="step", ylabel="loss", title=f"{title}, {len(base)} seeds")
        below.set(xlabel="step", ylabel=f"loss - loss of {baseline}, mean of {LAST} steps")
        below.axhline(0.0, color="black", linewidth=0.5)
    axes[0, 0].legend()
    axes[1, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _by_seed(runs: Losses) -> Any:
    return numpy.array([runs[seed] for seed in sorted(runs)])


def _line(axes: Any, steps: Any, runs: Any, colour: str, name: str, *, has_band: bool) -> None:
    mean, spread = runs.mean(0), runs.std(0, ddof=1)
    axes.plot(steps, mean, color=colour, linewidth=0.9, label=name)
    if has_band:
        axes.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.15)
