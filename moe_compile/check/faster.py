"""Section `faster`: steps by megamoe beside steps by Inductor, and by megamoe with less of it.

Contract
    All forms train the same step of one job, in turn: each from the same start, after a barrier,
    in an order that rotates with the round. A step takes what the slowest rank took. The ratio to
    Inductor is the median of those within rounds, with its interval (`paired`); Inductor's is the
    faster of its two settings. The first step of a form, which compiles it, is told apart, and a
    second is left out.
    On a GPU, megamoe that is not faster is a failure. On a CPU no time is: it has no link.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import torch._inductor.config as inductor_config
import torch.distributed as dist

from moe_compile.check.forms import (
    AS_ASKED,
    INDUCTOR,
    PLAIN,
    REORDERED,
    WITHOUT,
    Form,
    names_without,
)
from moe_compile.check.paired import ratio
from moe_compile.check.sections import Record, say
from moe_compile.check.steps import Steps
from moe_compile.check.team import Team, slowest
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware.measure import elapsed_s
from moe_compile.plan.chunk_numbers import NumericalChange
from moe_compile.report.explanation_text import why_nothing_was_rewritten

IN_TURN: Final = "steps in turn"
LESS: Final = "forms"


class Faster:
    """The section's work on this rank."""

    def __init__(self, job: Steps, config: MegaMoEConfig) -> None:
        """Time steps of `job`, whose options are `config`."""
        self._job, self._config = job, config
        self.ready: list[Form] = []
        """Forms that are compiled."""

    def compile(self, form: Form) -> dict[str, Any]:
        """Take a form's first steps; return the seconds of the first, and what megamoe did."""
        first_s = self._step(form)
        self._step(form)
        self.ready.append(form)
        if form.backend == INDUCTOR:
            return {"first_s": first_s}
        report = self._job.forms.report(form)
        return {
            "first_s": first_s,
            "nothing": why_nothing_was_rewritten(report),
            "without": names_without(self._config, report),
            "plan": plan_of(report),
        }

    def in_turn(self, rounds: int, only: Sequence[str] = ()) -> dict[str, list[float]]:
        """Return the seconds of a step of each form in each round, of the slowest rank.

        `only` names forms, where not all run.
        """
        names = {form.name: form for form in self.ready if not only or form.name in only}
        order, seconds = list(names), {name: list[float]() for name in names}
        for _ in range(rounds):
            order = [*order[1:], *order[:1]]
            gc.collect()  # torchtitan has switched it off meanwhile
            for name in order:
                seconds[name].append(self._step(names[name]))
        return {name: slowest(taken) for name, taken in seconds.items()}

    def _step(self, form: Form) -> float:
        job = self._job
        job.restore()
        dist.barrier()
        with job.forms.using(form):
            return elapsed_s(job.device.type, job.step)


PLANNED: Final = ("num_chunks", "chunk_edges", "dispatch", "nodes", "hop_slices", "wires")
"""What is done with a region, in its report."""


def plan_of(report: Mapping[str, Any]) -> list[Any]:
    """Return what megamoe does, by a report: equal where it does the same."""
    by_tokens = NumericalChange.BY_TOKENS.value
    regions = [
        [*(one[name] for name in PLANNED), by_tokens in one["remarks"]] for one in report["regions"]
    ]
    attention = [one["num_chunks"] for one in report["attention"]]
    parts = [p.get("applied") for p in report["passes"] if p["pass"] == "split_batch"]
    return [regions, attention, [one for one in parts if one]]


def judge_first(
    form: Form, compiled: dict[str, Any], record: Record, found: list[dict[str, Any]]
) -> None:
    """Note a form's first step; megamoe that rewrote nothing on any rank fails."""
    compiled[form.name] = {
        "first_s": max(one["first_s"] for one in found),
        "without": list(dict.fromkeys(n for one in found for n in one.get("without", ()))),
    }
    record.put(compiled=compiled)
    if form is AS_ASKED:
        why = next((one["nothing"] for one in found), "")
        is_rewritten = not all(one["nothing"] for one in found)
        record.expect(
            is_rewritten, form.name, f"megamoe rewrote nothing, so there is nothing to time: {why}"
        )
    say(f"faster: {form.name}: first step {compiled[form.name]['first_s']:.1f} s")


def judge_steps(device: str, record: Record, found: list[dict[str, list[float]]]) -> None:
    """Record a row of each form, its ratio to the faster of Inductor's among it."""
    seconds = found[0]  # all ranks have the slowest's
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    theirs = [form.name for form in (PLAIN, REORDERED) if form.name in seconds]
    if not record.expect(bool(theirs), IN_TURN, "no form of Inductor ran"):
        return
    best = min(theirs, key=lambda name: medians[name])
    for name, taken in seconds.items():
        against = ratio(taken, seconds[best])
        record.add_row(
            {
                "form": name,
                "step_s": medians[name],
                "first_s": record.data["compiled"][name]["first_s"],
                "ratio": asdict(against),
            }
        )
        if name == AS_ASKED.name and device == "cuda":
            why = f"MISSED: a step by megamoe takes {_said(against)} times as long as by {best}"
            record.expect(against.high < 1.0, name, why)
    record.put(best=best, is_measurement=device == "cuda")
    say("faster: " + ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in medians.items()))


def _said(against: Any) -> str:
    return f"{against.median:.3f} ({against.low:.3f}-{against.high:.3f})"


def check_faster(team: Team, job: Steps, config: MegaMoEConfig, rounds: int) -> None:
    """Run the section."""
    faster, compiled = Faster(job, config), dict[str, Any]()

    def start(form: Form) -> None:
        team.run(form.name, partial(faster.compile, form), partial(judge_first, form, compiled))

    start(PLAIN)
    if _is_known(REORDERED):
        start(REORDERED)
    elif team.record is not None:
        team.record.skip(f"inductor: {REORDERED.name}", "this torch has no such option")
    start(AS_ASKED)
    said = None
    if team.is_first:
        said = "\n".join(compiled.get(AS_ASKED.name, {}).get("without", ()))
    for name in filter(None, team.tell(LESS, said).split("\n")):
        start(WITHOUT[name])
    team.run(IN_TURN, partial(faster.in_turn, rounds), partial(judge_steps, job.device.type))


def _is_known(form: Form) -> bool:
    return form.options.keys() <= inductor_config.get_config_copy().keys()
