"""`python -m benchmarks.planner.raced_ways`: what `better` picks, against trying every way.

Contract
    The search is the product's (`moe_compile.check.better`): the planner's candidates, predictions
    of their schedules, a race by halving. A step is charged on the emulated device and link: it
    takes the same time in every run.
    Every way that the values of options allow is tried as well (`raced_settings.every_way`). The
    loss is the time of the pick over that of the fastest way tried, less 1.
    Each trial is written to the file of results as it comes. `--resume` takes trials from there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.planner.raced_layer import AS_ASKED, RacedLayer, told
from benchmarks.planner.raced_settings import ERROR, SETTINGS, Found, Raced, every_way
from moe_compile.check.better import form_of, options_of, predict, race
from moe_compile.check.candidates import Options, freed, over
from moe_compile.check.forms import AS_ASKED as ASKED
from moe_compile.check.forms import Form
from moe_compile.check.sections import Record, say, write_json
from moe_compile.check.team import Team
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import load_profile
from moe_compile.report.provenance import describe_machine, recorded_command

LONG_S: Final = 1e6
"""For the section: here no race runs out of time."""
NOISE: Final = 0.02
"""Standard deviation of a step's time, relative, in races with noise."""
NOISY_RACES: Final = 50
WIDTH: Final = 150


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One setting; times are milliseconds."""

    setting: str
    num_tried: int
    num_predicted: int
    num_raced: int
    picked: str
    """The way that won, or the job as asked where none is faster."""
    picked_ms: float
    best: str
    best_ms: float
    auto_ms: float
    """Of the planner's own choice."""
    predicted_best_ms: float
    """Of the way that is fastest by prediction."""
    as_asked_ms: float
    noisy_losses: tuple[float, ...] = ()
    """Of races in which steps have noise, each against the best without it."""

    @property
    def loss(self) -> float:
        """Return by which share the pick is slower than the best way."""
        return self.picked_ms / self.best_ms - 1.0

    def over_best(self, ms: float) -> float:
        """Return by which share another time is longer than the best."""
        return ms / self.best_ms - 1.0


class Trials:
    """What is known of one setting: its profile, the planner's candidates, each way's trial."""

    def __init__(
        self,
        raced: Raced,
        known: dict[str, Any],
        layer_of: Callable[[Raced], RacedLayer],
        keep: Callable[[], None],
        folder: Path,
    ) -> None:
        """Take what is `known` from there; add to it, and `keep` it, as more is found."""
        self._raced, self._known, self._layer_of, self._keep = raced, known, layer_of, keep
        known.setdefault("ways", {})
        path = folder / f"{raced.name.replace(':', '-')}.toml"
        if "profile" in known:
            path.write_text(known["profile"])
            profile = load_profile(str(path))
        else:
            profile = layer_of(raced).profile_of(raced)
        self.config: MegaMoEConfig = told(raced, profile, folder)
        self._add("profile", path.read_text)

    @property
    def ways(self) -> dict[str, Found]:
        """Return all trials so far, by the name of the way's form."""
        return dict(self._known["ways"])

    def candidates(self) -> dict[str, Any]:
        """Return what the planner ranks."""
        found: dict[str, Any] = self._add(
            "candidates", lambda: self._layer_of(self._raced).candidates(self.config)
        )
        return found

    def of_options(self, options: Options) -> Found:
        """Return the trial of a way, which is made unless it is known."""
        ways, name = self._known["ways"], form_of(options).name
        if name not in ways:
            ways[name] = self._layer_of(self._raced).found(self._raced, self.config, options)
            say(f"{self._raced.name}: {name}: {ways[name]['seconds'] * 1e3:.3f} ms")
            self._keep()
        return dict(ways[name])

    def _add(self, what: str, find: Callable[[], Any]) -> Any:
        if what not in self._known:
            self._known[what] = find()
            self._keep()
        return self._known[what]


class Charged:
    """What the search asks of a program, answered by trials."""

    def __init__(self, trials: Trials, noise: Callable[[], float] = lambda: 1.0) -> None:
        """Answer from `trials`; `noise` multiplies the time of each step of a race."""
        self._trials, self._noise = trials, noise

    def candidates(self) -> dict[str, Any]:
        """Return what the planner ranks."""
        return self._trials.candidates()

    def of(self, form: Form) -> Found:
        """Return a way's predicted time and plan."""
        return self._of(form)

    def compile(self, form: Form) -> dict[str, Any]:
        """Return the time of a way's first step, and its plan."""
        found = self._of(form)
        return {"first_s": found["seconds"], "plan": found["plan"]}

    def in_turn(self, rounds: int, only: Sequence[str] = ()) -> dict[str, list[float]]:
        """Return the seconds of a step of each way in each round."""
        ways = self._trials.ways
        return {n: [ways[n]["seconds"] * self._noise() for _ in range(rounds)] for n in only}

    def _of(self, form: Form) -> Found:
        return self._trials.of_options(options_of(form))


def searched(trials: Trials, charged: Charged) -> dict[str, Any]:
    """Return the record of the section `better`."""
    with tempfile.TemporaryDirectory(prefix="megamoe-race-") as folder:
        record = Record(path=Path(folder) / "better.json", deadline=time.monotonic() + LONG_S)
        team = Team(dist.HashStore(), 0, 1, record=record, makes_groups=False)
        race(team, charged, predict(team, charged, trials.config))
    if failures := record.data["failures"]:
        raise RuntimeError(f"{failures[0]['what']}: {failures[0]['traceback']}")
    return dict(record.data)


def picked(found: Mapping[str, Any]) -> str:
    """Return the name of the way that a record of the section ends with."""
    return form_of(found["won"]).name if found.get("is_faster") else ASKED.name


def race_in(raced: Raced, trials: Trials) -> Row:
    """Search in one setting, try every way, and race again with noise."""
    found = searched(trials, Charged(trials))
    for options in every_way(raced.case):
        trials.of_options(over(trials.config, options))
    return row_of(raced.name, trials, found, [*_noisy(raced.name, trials)])


def _noisy(name: str, trials: Trials) -> list[str]:
    """Return the pick of each race with noise: another seed, the same trials."""
    picks = []
    for seed in range(NOISY_RACES):
        draw = random.Random(f"{name} {seed}")
        charged = Charged(trials, lambda draw=draw: max(0.1, draw.gauss(1.0, NOISE)))
        with contextlib.redirect_stdout(io.StringIO()):
            picks.append(picked(searched(trials, charged)))
    return picks


def row_of(name: str, trials: Trials, found: Mapping[str, Any], noisy: Sequence[str] = ()) -> Row:
    """Return the row of a setting of which everything is known."""
    ms = {way: one["seconds"] * 1e3 for way, one in trials.ways.items()}
    best, pick = min(ms, key=lambda way: ms[way]), picked(found)
    predicted = {way: one["us"] for way, one in found["predicted"].items()}
    own = {option: value for option, value in freed(trials.config).items() if value == "auto"}
    return Row(
        setting=name,
        num_tried=len(ms),
        num_predicted=len(predicted),
        num_raced=len({row["form"] for row in found["rows"]}),
        picked=pick,
        picked_ms=ms[pick],
        best=best,
        best_ms=ms[best],
        auto_ms=ms[form_of(over(trials.config, own)).name],
        predicted_best_ms=ms[min(predicted, key=lambda way: predicted[way])],
        as_asked_ms=ms[ASKED.name],
        noisy_losses=tuple(ms[way] / ms[best] - 1.0 for way in noisy),
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the losses over all settings."""
    noisy = [loss for row in rows for loss in row.noisy_losses]
    return {
        "settings": len(rows),
        "largest_loss": max(row.loss for row in rows),
        "mean_loss": statistics.mean(row.loss for row in rows),
        "largest_loss_of_auto": max(row.over_best(row.auto_ms) for row in rows),
        "largest_loss_by_prediction": max(row.over_best(row.predicted_best_ms) for row in rows),
        "largest_loss_as_asked": max(row.over_best(row.as_asked_ms) for row in rows),
        "noisy_races": len(noisy),
        "largest_noisy_loss": max(noisy, default=0.0),
        "noisy_within_2_percent": sum(loss <= 0.02 for loss in noisy),
    }


def run(settings: Sequence[Raced], known: dict[str, Any], keep: Callable[[], None]) -> list[Row]:
    """Race in all settings; `known` has the trials of each, by name."""
    layers: dict[str, RacedLayer] = {}

    def layer_of(raced: Raced) -> RacedLayer:
        if raced.case.name not in layers:
            for other in layers.values():
                other.threads.close()
            layers.clear()
            layers[raced.case.name] = RacedLayer(raced.case, raced.topology)
        return layers[raced.case.name]

    rows = []
    with tempfile.TemporaryDirectory(prefix="megamoe-profiles-") as folder:
        for raced in settings:
            own = known.setdefault(raced.name, {})
            rows.append(race_in(raced, Trials(raced, own, layer_of, keep, Path(folder))))
            say(f"{raced.name}: {rows[-1].loss:.2%} over the best of {rows[-1].num_tried}")
    return rows


def main() -> int:
    """Race in all settings, print them, write the JSON asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner.raced_ways", description=__doc__
    )
    names = [raced.name for raced in SETTINGS]
    parser.add_argument("--setting", nargs="+", choices=names, help="only these")
    parser.add_argument("--json", type=Path, required=True, help="write the results here")
    parser.add_argument("--resume", action="store_true", help="take the trials of that file")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    settings = [raced for raced in SETTINGS if raced.name in (arguments.setting or names)]
    is_known = arguments.resume and arguments.json.exists()
    report: dict[str, Any] = json.loads(arguments.json.read_text()) if is_known else {}
    known = report.setdefault("settings", {})
    report |= {
        "command": recorded_command("benchmarks.planner.raced_ways", sys.argv[1:]),
        "machine": describe_machine(),
        "is_emulated": True,
        "error": ERROR,
        "noise": NOISE,
        "as_asked": asdict(AS_ASKED),
    }
    rows = run(settings, known, lambda: write_json(arguments.json, report))
    report |= {"summary": summary(rows), "rows": [{**asdict(r), "loss": r.loss} for r in rows]}
    write_json(arguments.json, report)
    _print(rows, report["summary"])
    return 0


def _print(rows: Sequence[Row], summed: Mapping[str, float]) -> None:
    table = Table(title="Ways on the emulated device and link, ms")
    for heading in ("setting", "tried", "predicted", "raced", "as asked", "auto", "picked", "best",
                    "loss", "pick"):  # fmt: skip
        table.add_column(heading)
    for row in rows:
        times = (row.as_asked_ms, row.auto_ms, row.picked_ms, row.best_ms)
        counts = (row.num_tried, row.num_predicted, row.num_raced)
        cells = [*map(str, counts), *(f"{ms:.2f}" for ms in times), f"{row.loss:.1%}"]
        table.add_row(row.setting, *cells, row.picked)
    console = Console(width=WIDTH)
    console.print(table)
    for key, value in summed.items():
        console.print(f"{key}: {value:.4f}")


if __name__ == "__main__":
    sys.exit(main())
