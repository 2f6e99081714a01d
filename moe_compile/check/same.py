"""Section `same`: steps by megamoe leave what steps as written leave.

Contract
    As written, twice: a program that does not repeat its own bits cannot be compared by bits.
    By megamoe, node by node: losses, outputs of blocks, gradients, the gradient norm, parameters,
    buffers and random state have the bits of the program as written, on every rank, after every
    step. Where options or a CPU leave bits open it is judged as generated code is, and says why.
    A form that was tried in a search (`culprit`) is judged alike, and is no failure if it differs.
    By Inductor and by megamoe, in generated code: gradients of the first step are no farther from
    those in float64 than `FACTOR` times Inductor's, and `FLOOR`. Where float64 does not run they
    are compared with those as written.
    A form in which megamoe rewrote nothing fails: it would only show that nothing was done.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from moe_compile.check.forms import (
    AGAIN,
    AS_ASKED,
    AS_WRITTEN,
    NODE_BY_NODE,
    PLAIN,
    PRECISE,
    Form,
)
from moe_compile.check.marks import Difference, distance, first_difference
from moe_compile.check.sections import Record, say
from moe_compile.check.steps import Steps, Trace, keeps_bits, trace
from moe_compile.check.team import RESTART, Team
from moe_compile.config import MegaMoEConfig
from moe_compile.plan.chunk_numbers import LAST_BITS
from moe_compile.report.explanation_text import why_nothing_was_rewritten

FACTOR: Final = 1.5
"""Times Inductor's distance that megamoe may be away: both round, at other places."""
FLOOR: Final = 1e-4
"""A distance that counts as none, also where Inductor has none."""
FLOOR_ALONE: Final = 0.02
"""As `FLOOR` where there is nothing of Inductor's beside it."""
FLOOR_LOSSY: Final = 0.06
"""As `FLOOR` where rows are in eight bits: 25 decibels of signal to noise."""
ALL: Final = "all gradients"
Place = tuple[str, str]
"""Name of a region, and its place in the source."""
Squares = Mapping[str, tuple[float, float]]
Work = Callable[[Form], Any]
"""Runs a form on this rank."""
Verdicts = Callable[[Form, Record, list[Any]], None]
"""Judges the findings of all ranks."""


@dataclass(kw_only=True, slots=True)
class Found:
    """What one rank found of a form."""

    losses: list[float]
    seconds: float
    difference: Difference | None = None
    """From the program as written."""
    squares: Squares = field(default_factory=dict)
    nothing: str = ""
    """Why megamoe rewrote nothing, "" where it did, or was not asked."""
    excuses: tuple[str, ...] = ()
    """Why bits may differ from those as written."""
    passes: tuple[str, ...] = ()
    """Passes that changed a graph."""
    regions: tuple[str, ...] = ()
    """The verdict on each region."""
    places: tuple[Place, ...] = ()
    """Where the regions are in the source."""


class Same:
    """The section's work on this rank; what it keeps between items."""

    def __init__(self, job: Steps, config: MegaMoEConfig, num_steps: int) -> None:
        """Check `job`, whose options are `config`."""
        self._job, self._config, self._num_steps = job, config, num_steps
        self._written: Trace | None = None
        self._precise: Trace | None = None
        self._no_precise = ""

    def written(self) -> Trace:
        """Return the trace as written."""
        if self._written is None:
            self._written = trace(self._job, AS_WRITTEN, self._num_steps, keeps=True)
        return self._written

    def run(self, form: Form) -> Found:
        """Run a form and compare it with the program as written."""
        written = self.written()
        reference = written.gradients
        if not keeps_bits(form):
            self.run_precise()
            reference = (self._precise or written).gradients
        found = (
            written
            if form is AS_WRITTEN
            else trace(self._job, form, self._num_steps, reference=reference)
        )
        return Found(
            losses=found.losses,
            seconds=found.seconds,
            difference=first_difference(written.marks, found.marks),
            squares=found.squares,
            **(self._said(form) if form.backend == AS_ASKED.backend else {}),
        )

    def run_precise(self) -> str:
        """Keep the gradients in float64; return why there are none, "" where there are."""
        if self._precise is not None or self._no_precise:
            return self._no_precise
        try:
            self._precise = trace(self._job, PRECISE, 1, keeps=True)
        except Exception as error:  # noqa: BLE001  (a model may hold code that has no float64)
            self._no_precise = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        return self._no_precise

    def settle(self, no_precise: str) -> None:
        """Compare with float64 on no rank, where it did not run on one, for the reason given."""
        if no_precise:
            self._precise, self._no_precise = None, no_precise

    def _said(self, form: Form) -> dict[str, Any]:
        report = self._job.forms.report(form)
        return {
            "nothing": why_nothing_was_rewritten(report),
            "excuses": excuses(self._config, report),
            "passes": passes_of(report),
            "regions": tuple(one["verdict"] for one in _regions(report)),
            "places": places_of(report),
        }


def passes_of(report: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the passes that changed a graph, by a report."""
    return tuple(dict.fromkeys(one["pass"] for one in report["passes"] if one.get("applied")))


def places_of(report: Mapping[str, Any]) -> tuple[Place, ...]:
    """Return the name of each region of a report, and where it is in the source."""
    return tuple(dict.fromkeys((one["name"], one["where"]) for one in _regions(report)))


def _regions(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [r for r in report["regions"] + report["attention"] if r.get("is_region", True)]


def excuses(config: MegaMoEConfig, report: Mapping[str, Any]) -> tuple[str, ...]:
    """Return why bits may differ from those as written: options, and what a CPU rounds by place."""
    regions, applied = [*report["regions"], *report["attention"]], passes_of(report)
    said = [text for one in regions for text in one["remarks"] if text.startswith(LAST_BITS)]
    asked = {
        f"numerics = {config.numerics!r}": config.numerics != "exact",
        f"batch_parts = {config.batch_parts!r}": config.batch_parts not in (1, "auto"),
        'chunk_by = "tokens"': config.chunk_by == "tokens",
        'nodes = "rounded"': config.nodes == "rounded",
        'dispatch = "all_gather"': any(r["dispatch"] == "all_gather" for r in report["regions"]),
        "rows in eight bits": _sends_eight_bits(config),
        "products in eight bits": "quantize_products" in applied,
        "scores before the down projection": "apply_scores" in applied,
        "gradients that travel in bfloat16": "compress_gradients" in applied,
    }
    return tuple(dict.fromkeys([*(name for name, is_so in asked.items() if is_so), *said]))


def is_lossy(config: MegaMoEConfig) -> bool:
    """Whether options ask for rows, or for products, in eight bits."""
    return _sends_eight_bits(config) or config.expert_compute != "same"


def _sends_eight_bits(config: MegaMoEConfig) -> bool:
    wires = (config.dispatch_wire, config.combine_wire)
    return any(w.startswith("fp8") for w in wires) or config.numerics == "lossy"


class Judge:
    """Rank 0's verdicts on the forms, in the order in which they ran."""

    def __init__(self, config: MegaMoEConfig) -> None:
        """Judge a job with these options."""
        self._floor = FLOOR_LOSSY if is_lossy(config) else FLOOR

    def judge(self, form: Form, record: Record, found: list[Found]) -> None:
        """Record a form's row, and a failure where it is not the same."""
        row = self._row(form, record, found)
        if form is AGAIN:
            record.put(repeats=row["holds"])
        record.add_row(row)
        record.expect(row["holds"], form.name, _with_passes(row["found"], row["passes"]))
        if nothing := next((one.nothing for one in found if one.nothing), ""):
            why = f"megamoe rewrote nothing, so equal results show nothing: {nothing}"
            record.expect(not all(one.nothing for one in found), form.name, why)
        say(f"same: {form.name}: {row['found']}")

    def try_out(self, form: Form, record: Record, found: list[Found]) -> None:
        """Note whether a form that was tried in a search is the same; it is no failure if not."""
        row = self._row(form, record, found)
        record.put(tried=[*record.data.get("tried", ()), row])
        say(f"tried: {form.name}: {row['found']}")

    def _row(self, form: Form, record: Record, found: Sequence[Found]) -> dict[str, Any]:
        """Return a form's row in the table, with whether it `holds`."""
        differs = [(r, one.difference) for r, one in enumerate(found) if one.difference is not None]
        said, is_same = "the same bit for bit", not differs
        row: dict[str, Any] = {
            "form": form.name,
            "losses": found[-1].losses,  # of a pipeline the last rank has one
            "seconds": max(one.seconds for one in found),
            "passes": sorted({name for one in found for name in one.passes}),
            "regions": counted([verdict for one in found for verdict in one.regions]),
            "places": list(dict.fromkeys(place for one in found for place in one.places)),
            "excuses": list(dict.fromkeys(text for one in found for text in one.excuses)),
        }
        if differs:
            said = told(*differs[0], len(differs))
            if form is not AGAIN and not record.data.get("repeats", True):
                said += "; two runs of the program as written differ too"
            row["first_difference"] = {"rank": differs[0][0], **asdict(differs[0][1])}
        if not keeps_bits(form) or (row["excuses"] and not is_same):
            why, more = self._by_distance(form, record, found)
            row |= more
            is_same, said = not why, why or more["found"]
        return {**row, "found": said, "holds": is_same}

    def _by_distance(
        self, form: Form, record: Record, found: Sequence[Found]
    ) -> tuple[str, dict[str, Any]]:
        """Return why a form is too far from the reference, "" where it is not, and its numbers."""
        distances = distances_of([one.squares for one in found])
        reference = record.data.get("reference", AS_WRITTEN.name)
        said = f"distance of gradients from {reference}: {distances[ALL]:.2g}"
        more: dict[str, Any] = {"distance": distances[ALL], "reference": reference}
        if form is PLAIN:
            record.put(inductor=distances)
            is_number = math.isfinite(distances[ALL])
            return ("" if is_number else "its gradients are NaN or infinite"), more | {
                "found": said
            }
        theirs = record.data.get("inductor", {})
        if ALL in theirs:
            said += f"; Inductor's distance: {theirs[ALL]:.2g}"
        floor = self._floor if theirs else max(self._floor, FLOOR_ALONE)
        most, where = farthest(distances, theirs, floor)
        more |= {"found": said, "share_of_limit": most, "farthest": where}
        if most <= 1.0:
            return "", more
        own = distances[where]
        beside = f", and Inductor's distance is {theirs[where]:.2g}" if where in theirs else ""
        return (
            f"the distance of {where} from {reference} is {own:.2g}{beside}; at most "
            f"{own / most:.2g} is allowed"
        ), more


def distances_of(ranks: Sequence[Squares]) -> dict[str, float]:
    """Return the distance of each gradient, over all ranks, and of all together."""
    by_name: dict[str, list[tuple[float, float]]] = {}
    for squares in ranks:
        for name, pair in squares.items():
            by_name.setdefault(name, []).append(pair)
    if not by_name:
        return {ALL: math.inf}
    together = [pair for pairs in by_name.values() for pair in pairs]
    return {ALL: distance(together), **{name: distance(p) for name, p in by_name.items()}}


def farthest(
    own: Mapping[str, float], theirs: Mapping[str, float], floor: float
) -> tuple[float, str]:
    """Return the largest share of what each distance may be, and whose it is.

    A tensor may be as far as `FACTOR` times Inductor's distance of it, or of all together where
    that is more, and `floor`.
    """
    whole = theirs.get(ALL, 0.0)
    shares = {n: d / (FACTOR * max(theirs.get(n, 0.0), whole) + floor) for n, d in own.items()}
    where = max(shares, key=lambda name: shares[name])
    return shares[where], where


def counted(verdicts: Sequence[str]) -> list[str]:
    """Return each verdict on regions once, with its number."""
    return [f"{number} regions {verdict}" for verdict, number in Counter(verdicts).items()]


def told(rank: int, first: Difference, num_ranks: int) -> str:
    """Return a difference in words."""
    others = f", on {num_ranks} ranks" if num_ranks > 1 else ""
    later = f"; {first.num_others} later tensors differ too" if first.num_others else ""
    norms = f"its norm is {first.found:.9g}, and {first.written:.9g} as written"
    return f"the first tensor that differs is {first.name} on rank {rank}{others}: {norms}{later}"


def _with_passes(said: str, passes: Sequence[str]) -> str:
    return f"{said}. These passes changed a graph: {', '.join(passes)}" if passes else said


class Trials:
    """Forms that all ranks run and rank 0 judges, each an item of the team."""

    def __init__(
        self, team: Team, job: Steps, config: MegaMoEConfig, num_steps: int, limit_s: float = 0.0
    ) -> None:
        """Run forms of `job`; processes that take longer than `limit_s` for one end, unless 0."""
        self.team, self.job, self.config = team, job, config
        self._same, self._judge = Same(job, config, num_steps), Judge(config)
        self.limit_s = limit_s

    def run(self, form: Form) -> bool:
        """Run and judge a form for the section's table; return False, on all ranks, if it is wrong.

        A form that no longer fits in the time is not.
        """
        return self._verdict(form, self._work, self._judge.judge, 0.0) != WRONG

    def is_right(self, form: Form, needs_s: float = 0.0) -> bool:
        """Try a form out; return, on all ranks, whether it holds.

        A form that raises, or does not end, does not. Raises OutOfTime where it was not run.
        """
        return self._holds(form, self._work, self._judge.try_out, needs_s)

    def run_precise(self) -> None:
        """Run in float64 what distances are from; on no rank where it does not run on one."""
        self.team.run(PRECISE.name, self._same.run_precise, judge_precise)
        record = self.team.record
        said = None if record is None else str(record.data.get("no_float64", ""))
        self._same.settle(self.team.tell("no float64", said))

    def _work(self, form: Form) -> Found:
        with ended_after(self.limit_s, form.name):
            return self._same.run(form)

    def _holds(self, form: Form, work: Work, judge: Verdicts, needs_s: float) -> bool:
        verdict = self._verdict(form, work, judge, needs_s)
        if verdict == OPEN:
            raise OutOfTime(form.name)
        return verdict == HOLDS

    def _verdict(self, form: Form, work: Work, judge: Verdicts, needs_s: float) -> str:
        """Return the verdict on a form, on all ranks."""
        self.team.run(form.name, partial(work, form), partial(judge, form), needs_s=needs_s)
        record = self.team.record
        said = None if record is None else verdict_of(form, record)
        return self.team.tell(f"verdict/{form.name}", said)


HOLDS: Final = "holds"
WRONG: Final = "wrong"
OPEN: Final = "open"


class OutOfTime(Exception):
    """A form was not run, since it no longer fits in the section's time."""


def verdict_of(form: Form, record: Record) -> str:
    """Return the verdict on a form that was run, by this process or one before it."""
    rows = [*record.data["rows"], *record.data.get("tried", ())]
    for row in rows:
        if row["form"] == form.name:
            return HOLDS if row["holds"] else WRONG
    why = next((f["why"] for f in record.data["failures"] if f["what"] == form.name), "")
    if not why:
        return OPEN
    record.put(
        tried=[*record.data.get("tried", ()), {"form": form.name, "found": why, "holds": False}]
    )
    return WRONG


@contextlib.contextmanager
def ended_after(seconds: float, what: str) -> Iterator[None]:
    """End this process where what is within takes longer, so that a new one goes on; not with 0."""

    def end() -> None:
        say(f"{what} did not end within {seconds:.0f} s, so its processes are stopped")
        os._exit(RESTART)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    if seconds:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_same(trials: Trials, *, until_wrong: bool = False) -> Form | None:
    """Run the section; return the first form by megamoe that is wrong, None where none is.

    With `until_wrong` nothing runs once one is.
    """
    trials.run(AS_WRITTEN)
    trials.run(AGAIN)
    wrong = None if trials.run(NODE_BY_NODE) else NODE_BY_NODE
    if trials.config.codegen == "fx" or (until_wrong and wrong):
        return wrong
    trials.run_precise()
    trials.run(PLAIN)
    return wrong if trials.run(AS_ASKED) else wrong or AS_ASKED


def judge_precise(record: Record, found: list[str]) -> None:
    """Note what distances are from: float64, unless it did not run on some rank."""
    why = next(filter(None, found), "")
    record.put(reference=AS_WRITTEN.name if why else PRECISE.name, no_float64=why)
    if why:
        record.put(
            warnings=[
                f"the model does not run in float64 ({why}): distances are measured from the "
                "program as written"
            ]
        )
