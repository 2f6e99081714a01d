"""Section `better`: the ways to run a job that the planner ranks, raced for the fastest of them.

Contract
    Ways are the planner's candidates (`candidates`), as the job's `numerics` allows. Each is
    compiled node by node first, which generates no code: so its step is predicted as the schedule
    has it. The fastest by prediction are raced beside the job as asked: first one of each way to
    divide the work. Ways by which megamoe does the same are raced once.
    Successive halving (Karnin, Koren, Somekh 2013, algorithm 1): all run a few rounds in turn, the
    slower half leaves, the others run twice as many. The job as asked stays to the end: what is
    told is the ratio to it, with its interval. No result is a failure.
    What no longer fits in the time is left out, and said.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final, Protocol

from moe_compile.check.candidates import found_in, freed, spread, ways
from moe_compile.check.faster import Faster, plan_of
from moe_compile.check.forms import AS_ASKED, OURS, Form
from moe_compile.check.paired import ratio
from moe_compile.check.sections import Record, say
from moe_compile.check.steps import Steps
from moe_compile.check.team import Team
from moe_compile.config import PREFIX, MegaMoEConfig

RACED: Final = 8
"""Ways that are compiled and raced at most, the fastest by prediction."""
FIRST_ROUNDS: Final = 3
"""Rounds in which all run; each later race has twice as many."""
ROUNDS: Final = 24
"""Rounds of the last race, of one way and the job as asked."""
SLACK: Final = 1.5
"""Times the longest first step so far that must be left for another way."""
PLANNED: Final = "what the planner ranks"


class Predictor(Protocol):
    """What the list of ways to race is made by."""

    def candidates(self) -> dict[str, Any]:
        """Return what the planner ranks on this rank (`candidates.found_in`)."""

    def of(self, form: Form) -> dict[str, Any]:
        """Return a way's predicted time as `us`, and its `plan`."""


class Racers(Protocol):
    """What a race asks of the program whose steps are timed."""

    def compile(self, form: Form) -> dict[str, Any]:
        """Take a form's first steps; return `first_s` and its `plan`."""

    def in_turn(self, rounds: int, only: Sequence[str] = ()) -> dict[str, list[float]]:
        """Return the seconds of a step of each form in each round, of the slowest rank."""


def form_of(options: Mapping[str, Any]) -> Form:
    """Return the form of a job with these options over its own, named as a TOML table has them."""
    name = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    given = {PREFIX + option: value for option, value in options.items()}
    return Form(name=name or AS_ASKED.name, backend=OURS, options=given)


def options_of(form: Form) -> dict[str, Any]:
    """Return the options that `form_of` has made a form of."""
    return {name.removeprefix(PREFIX): value for name, value in form.options.items()}


class Prediction:
    """What each way takes by prediction, and what megamoe does in it: node by node, on one rank."""

    def __init__(self, job: Steps, config: MegaMoEConfig) -> None:
        """Predict steps of `job`, whose options are `config`."""
        self._job, self._config = job, config

    def candidates(self) -> dict[str, Any]:
        """Return what the planner ranks on this rank."""
        return found_in(self._report(form_of(freed(self._config))))

    def of(self, form: Form) -> dict[str, Any]:
        """Return the predicted time of the graphs of a step, each once, and the plan."""
        report = self._report(form)
        return {"us": predicted_us(report), "plan": plan_of(report)}

    def _report(self, form: Form) -> dict[str, Any]:
        options = {**form.options, PREFIX + "codegen": "fx"}
        by_node = form if self._config.codegen == "fx" else replace(form, options=options)
        self._job.restore()
        with self._job.forms.using(by_node):
            self._job.step()
        return self._job.forms.report(by_node)


def predicted_us(report: Mapping[str, Any]) -> float:
    """Return the predicted time of all graphs in which exchanges are scheduled, microseconds."""
    measures = (one.get("measures", {}) for one in report["passes"])
    return float(sum(one.get("step_us", 0.0) for one in measures))


def judge_prediction(name: str, record: Record, found: list[dict[str, Any]]) -> None:
    """Keep a way's predicted time, of the slowest rank; one that does what another does leaves."""
    known: dict[str, Any] = record.data.get("predicted", {})
    plan = json.dumps([one["plan"] for one in found])
    alike = next((other for other, one in known.items() if one["plan"] == plan), "")
    if alike:
        record.skip(name, f"it makes the same rewrites as: {alike}")
        return
    us = max(one["us"] for one in found)
    record.put(predicted={**known, name: {"us": us, "plan": plan}})
    say(f"better: a step is predicted to take {us / 1e3:.2f} ms with {name}")


def by_prediction(
    predicted: Mapping[str, Mapping[str, Any]], forms: Mapping[str, Form]
) -> list[str]:
    """Return the names of the ways to race: the job as asked, then the fastest by prediction, as
    `spread` has them."""
    others = [name for name in predicted if name != AS_ASKED.name]
    others.sort(key=lambda name: predicted[name]["us"])
    raced = spread([options_of(forms[name]) for name in others])[:RACED]
    return [AS_ASKED.name, *(form_of(options).name for options in raced)]


class Race:
    """Rank 0's account of a race: who runs, and what it took."""

    def __init__(self) -> None:
        """Begin without a way."""
        self.plans: dict[str, str] = {}
        """What megamoe does in each way that is raced."""
        self.longest_s = 0.0

    def judge_first(self, form: Form, record: Record, found: list[dict[str, Any]]) -> None:
        """Take a way into the race, unless another does the same."""
        self.longest_s = max(self.longest_s, *(one["first_s"] for one in found))
        plan = json.dumps([one["plan"] for one in found])
        alike = next((name for name, other in self.plans.items() if other == plan), "")
        if alike:
            record.skip(form.name, f"it makes the same rewrites as: {alike}")
        else:
            self.plans[form.name] = plan
        say(f"better: {form.name}: first step {max(one['first_s'] for one in found):.1f} s")

    def judge_rounds(
        self, rounds: int, record: Record, found: list[dict[str, list[float]]]
    ) -> None:
        """Record a race's times, and keep the faster half beside the job as asked."""
        seconds = found[0]  # all ranks have the slowest's
        own = seconds[AS_ASKED.name]
        others = sorted(
            (name for name in seconds if name != AS_ASKED.name),
            key=lambda name: statistics.median(seconds[name]),
        )
        kept = others[: (len(others) + 1) // 2]
        for name in [AS_ASKED.name, *others]:
            record.add_row(
                {
                    "form": name,
                    "rounds": rounds,
                    "step_s": statistics.median(seconds[name]),
                    "ratio": asdict(ratio(seconds[name], own)),
                    "goes_on": name in kept or name == AS_ASKED.name,
                }
            )
        self.plans = {name: self.plans[name] for name in (AS_ASKED.name, *kept)}
        say(f"better: {rounds} rounds: {', '.join(others[:3])}")


def check_better(team: Team, job: Steps, config: MegaMoEConfig) -> None:
    """Run the section."""
    forms = predict(team, Prediction(job, config), config)
    race(team, Faster(job, config), forms)


def predict(team: Team, prediction: Predictor, config: MegaMoEConfig) -> list[Form]:
    """Return the ways to race, the job as asked first, then by predicted time; alike on ranks."""
    team.run(
        PLANNED,
        prediction.candidates,
        lambda record, found: record.put(ways=ways(found, config)),
    )
    record = team.record
    told = team.tell("ways", None if record is None else json.dumps(record.data.get("ways", [])))
    forms = {form.name: form for form in (AS_ASKED, *map(form_of, json.loads(told)))}
    for form in forms.values():
        judge = partial(judge_prediction, form.name)
        team.run(f"prediction of {form.name}", partial(prediction.of, form), judge)
    names = None if record is None else by_prediction(record.data.get("predicted", {}), forms)
    raced = json.loads(team.tell("raced", None if names is None else json.dumps(names)))
    return [forms[name] for name in raced]


def race(team: Team, racers: Racers, forms: Sequence[Form]) -> None:
    """Race `forms`, the first of which is the job as asked, and record the winner."""
    told = Race()
    for form in forms:
        team.run(
            form.name,
            partial(racers.compile, form),
            partial(told.judge_first, form),
            needs_s=SLACK * told.longest_s,
        )
    rounds = FIRST_ROUNDS
    while len(names := _told(team, told, rounds)) > 1:
        is_last = len(names) == 2
        rounds = ROUNDS if is_last else rounds
        team.run(
            f"{len(names)} sets of options, {rounds} rounds",
            partial(racers.in_turn, rounds, names),
            partial(told.judge_rounds, rounds),
        )
        if is_last:
            break
        rounds *= 2
    if team.record is not None:
        team.record.put(**result(team.record.data["rows"], {form.name: form for form in forms[1:]}))


def _told(team: Team, told: Race, rounds: int) -> list[str]:
    """Return who runs next, as rank 0 says."""
    said = "\n".join(told.plans) if team.is_first else None
    return team.tell(f"race of {rounds}", said).split("\n")


def result(rows: Sequence[Mapping[str, Any]], forms: Mapping[str, Form]) -> dict[str, Any]:
    """Return the options that won and whether they are faster than as asked; {} without a race."""
    last = [row for row in rows if row["form"] in forms]
    if not last:
        return {}
    most = max(row["rounds"] for row in last)
    best = min((row for row in last if row["rounds"] == most), key=lambda row: row["step_s"])
    won = options_of(forms[best["form"]])
    return {"won": won, "ratio": best["ratio"], "is_faster": best["ratio"]["high"] < 1.0}
