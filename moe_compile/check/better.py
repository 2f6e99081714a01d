"""Section `better`: other ways for megamoe to run a job, raced for the fastest of them.

Contract
    Ways are those that the job's `numerics` allows: what the planner chooses ("auto"), numbers of
    chunks, groups of heads; chunks of tokens and parts of the batch where it is "bounded"; rows in
    eight bits where it is "lossy". Ways by which megamoe does the same are raced once.
    Successive halving (Karnin, Koren, Somekh 2013, algorithm 1): all run a few rounds in turn, the
    slower half leaves, the others run twice as many. The job as asked stays to the end: what is
    told is the ratio to it, with its interval. No result is a failure.
    What no longer fits in the time is left out, and said.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from moe_compile.check.faster import Faster
from moe_compile.check.forms import AS_ASKED, OURS, Form
from moe_compile.check.paired import ratio
from moe_compile.check.sections import Record, say
from moe_compile.check.steps import Steps
from moe_compile.check.team import Team
from moe_compile.config import PREFIX, MegaMoEConfig

EXACT: Final[Sequence[Mapping[str, Any]]] = (
    {"chunks": "auto"},
    *({"chunks": number} for number in (1, 2, 4, 8)),
    {"chunks": 4, "chunk_edges": "load"},
    {"attention_chunks": 2},
)
BOUNDED: Final[Sequence[Mapping[str, Any]]] = (
    *({"chunks": number, "chunk_by": "tokens"} for number in (2, 4)),
    {"batch_parts": 2},
)
LOSSY: Final[Sequence[Mapping[str, Any]]] = ({"dispatch_wire": "fp8", "combine_wire": "fp8"},)
"""Ways by the least `numerics` that allows them, over the job's own options."""
FIRST_ROUNDS: Final = 3
"""Rounds in which all run; each later race has twice as many."""
ROUNDS: Final = 24
"""Rounds of the last race, of one way and the job as asked."""
SLACK: Final = 1.5
"""Times the longest first step so far that must be left for another way."""


def ways(config: MegaMoEConfig) -> dict[str, Form]:
    """Return the ways to try beside the job as asked, by name."""
    allowed = [*EXACT]
    allowed += BOUNDED if config.allows("bounded") else ()
    allowed += LOSSY if config.allows("lossy") else ()
    found = {}
    for options in allowed:
        if all(getattr(config, name) == value for name, value in options.items()):
            continue  # as asked
        name = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
        given = {PREFIX + option: value for option, value in options.items()}
        found[name] = Form(name=name, backend=OURS, options=given)
    return found


def is_possible(form: Form, experts: int) -> bool:
    """Return whether a form's number of chunks, if it has one, is not above the experts'."""
    chunks = form.options.get(PREFIX + "chunks", 1)
    by_tokens = form.options.get(PREFIX + "chunk_by") == "tokens"
    return by_tokens or not isinstance(chunks, int) or chunks <= experts


class Race:
    """Rank 0's account of a race: who runs, and what it took."""

    def __init__(self) -> None:
        """Begin without a way."""
        self.plans: dict[str, str] = {}
        """What megamoe does in each way that is raced."""
        self.longest_s = 0.0
        self.experts = 0
        """The most experts that a rank has of a layer: more chunks of experts there are not."""

    def judge_first(self, form: Form, record: Record, found: list[dict[str, Any]]) -> None:
        """Take a way into the race, unless another does the same."""
        self.longest_s = max(self.longest_s, *(one["first_s"] for one in found))
        self.experts = max(self.experts, *(one["experts"] for one in found))
        plan = json.dumps([one["plan"] for one in found])
        alike = next((name for name, other in self.plans.items() if other == plan), "")
        if alike:
            record.skip(form.name, f"does what is done by: {alike}")
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
    faster, race, forms = Faster(job, config), Race(), ways(config)

    def start(form: Form) -> None:
        work, judge = partial(faster.compile, form), partial(race.judge_first, form)
        team.run(form.name, work, judge, needs_s=SLACK * race.longest_s)

    start(AS_ASKED)
    experts = int(team.tell("experts", str(race.experts) if team.is_first else None))
    for form in forms.values():
        if is_possible(form, experts):
            start(form)
    rounds = FIRST_ROUNDS
    while len(names := _told(team, race, rounds)) > 1:
        is_last = len(names) == 2
        rounds = ROUNDS if is_last else rounds
        team.run(
            f"{len(names)} ways, {rounds} rounds",
            partial(faster.in_turn, rounds, names),
            partial(race.judge_rounds, rounds),
        )
        if is_last:
            break
        rounds *= 2
    if team.record is not None:
        team.record.put(**result(team.record.data["rows"], forms))


def _told(team: Team, race: Race, rounds: int) -> list[str]:
    """Return who runs next, as rank 0 says."""
    said = "\n".join(race.plans) if team.is_first else None
    return team.tell(f"race of {rounds}", said).split("\n")


def result(rows: Sequence[Mapping[str, Any]], forms: Mapping[str, Form]) -> dict[str, Any]:
    """Return the options that won and whether they are faster than as asked; {} without a race."""
    last = [row for row in rows if row["form"] in forms]
    if not last:
        return {}
    most = max(row["rounds"] for row in last)
    best = min((row for row in last if row["rounds"] == most), key=lambda row: row["step_s"])
    options = {k.removeprefix(PREFIX): v for k, v in forms[best["form"]].options.items()}
    return {"won": options, "ratio": best["ratio"], "is_faster": best["ratio"]["high"] < 1.0}
