"""Where megamoe's values are wrong: which pass makes them so, then in which block.

Contract
    Every trial is one more form of the job, with some passes left out or in some blocks alone.
    Passes are those that changed a graph, or all where the wrong form did not come to its end. They
    are tried in the order of the pipeline; the needed ones are left out after all others, since
    without them values may be wrong for another reason.
    All ranks make the same trials: each goes by the verdict of rank 0. The findings are `culprit`
    in the section's file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from moe_compile.check.forms import Form, without_passes
from moe_compile.check.same import OutOfTime, Trials, check_same
from moe_compile.check.search import Culprit, find_culprit, first_wrong, said_of
from moe_compile.check.sections import Record
from passes.pipeline import LEVELS, outside_rewrites

NO_PASS: Final = (
    "values are also wrong when all passes are left out, so no pass is at fault. Compare with "
    '--compile.backend inductor, and run with TORCH_LOGS="+moe_compile"'
)
NOT_REPEATED: Final = (
    "the program as written does not repeat its own bits, so nothing can be compared"
)
OUT_OF_TIME: Final = "the time limit ended the search before a pass was found"
SLACK: Final = 1.5
"""Times the seconds of the wrong form that a trial must have."""
Finding = Mapping[str, Any]


def in_order(names: Sequence[str]) -> list[str]:
    """Return passes that may be left out in the order of trials; all of them for no names."""
    rewrites = [*(p for level in LEVELS for p in level.passes), *outside_rewrites()]
    known = [p for p in rewrites if not p.is_check and (p.name in names or not names)]
    return [p.name for p in sorted(known, key=lambda p: not p.is_needed)]


def is_needed(name: str) -> bool:
    """Whether values may be wrong without the pass."""
    return any(p.name == name and p.is_needed for level in LEVELS for p in level.passes)


def check_and_search(trials: Trials) -> None:
    """Run the section `same`, and name the pass where values are wrong, as far as time allows."""
    if wrong := check_same(trials):
        search(trials, wrong, goes_into_blocks=False)


def check_culprit(trials: Trials) -> None:
    """Run the section `culprit`: what is the same until something is not, then the search."""
    if wrong := check_same(trials, until_wrong=True):
        search(trials, wrong, goes_into_blocks=True)


def search(trials: Trials, wrong: Form, *, goes_into_blocks: bool) -> None:
    """Search for what makes a form wrong, and record what is found."""
    record = trials.team.record
    row = {} if record is None else _row(record, wrong)
    told = {"repeats": record.data.get("repeats", True), **row} if record is not None else None
    said = trials.team.tell(f"wrong/{wrong.name}", None if told is None else json.dumps(told))
    row = json.loads(said)
    found: dict[str, Any] = {"form": wrong.name, "tensor": row.get("found", "it did not end")}
    if not row["repeats"]:
        found["why"] = NOT_REPEATED
    else:
        try:
            found |= _searched(trials, wrong, row, goes_into_blocks=goes_into_blocks)
        except OutOfTime:
            found["why"] = OUT_OF_TIME
    if record is not None:
        record.put(culprit=found)


def _row(record: Record, form: Form) -> dict[str, Any]:
    rows = (*record.data["rows"], *record.data.get("tried", ()))
    return next((dict(row) for row in rows if row["form"] == form.name), {})


def _searched(
    trials: Trials, wrong: Form, row: Finding, *, goes_into_blocks: bool
) -> dict[str, Any]:
    names = in_order(row.get("passes", ()))
    needs_s = SLACK * row.get("seconds", 0.0)

    def is_right(left_out: frozenset[str]) -> bool:
        asked = [name for name in names if name in left_out]
        form = without_passes(wrong, trials.config, asked, said_of(names, asked))
        return trials.is_right(form, needs_s)

    culprit = find_culprit(names, is_right)
    if culprit is None:
        return {"why": NO_PASS}
    found = {
        **_named(culprit),
        "places": row.get("places", []),
        "left_out_before": list(trials.config.disable_passes),
    }
    return {**found, **(_block(trials, wrong, needs_s) if goes_into_blocks else {})}


def _named(culprit: Culprit) -> dict[str, Any]:
    before = culprit.right_up_to
    return {**asdict(culprit), "right_up_to": "" if is_needed(before) else before}


def _block(trials: Trials, wrong: Form, needs_s: float) -> dict[str, Any]:
    """Return the first block that makes values wrong, its number from 1, where there are several.

    On each rank of a pipeline it is one of that rank's own.
    """

    def is_right(blocks: frozenset[int], said: str) -> bool:
        form = replace(wrong, name=f"{wrong.name}, in {said} alone", blocks=blocks)
        return trials.is_right(form, needs_s)

    number = _num_blocks(trials)
    if number < 2:
        return {}
    first = first_wrong(
        number, lambda k: is_right(frozenset(range(k)), f"blocks 1 to {k}" if k > 1 else "block 1")
    )
    is_alone = first == 1 or not is_right(frozenset({first - 1}), f"block {first}")
    return {"block": first, "is_alone": is_alone}


def _num_blocks(trials: Trials) -> int:
    """Return the largest number of blocks of a rank: stages of a pipeline may have others."""
    trials.team.run(
        "number of blocks",
        lambda: trials.job.forms.num_switches,
        lambda record, found: record.put(num_blocks=max(found)),
    )
    record = trials.team.record
    said = None if record is None else str(record.data.get("num_blocks", 0))
    return int(trials.team.tell("blocks", said))


def is_found(found: Finding) -> bool:
    """Whether a search came to a pass."""
    return bool(found.get("names"))


def sentences(found: Finding) -> list[str]:
    """Return the findings of a search in words; [] without one."""
    if not found:
        return []
    if not is_found(found):
        return [f"no culprit is named: {found['why']}"]
    names, before = found["names"], found["right_up_to"]
    right = f"right with passes up to {before}" if before else "right without passes"
    several = "pass" if len(names) == 1 else "passes"
    where = f", in {_where(found)}" if "block" in found else ""
    places = f" (regions at {'; '.join(found['places'])})" if found.get("places") else ""
    left_out = ",".join([*found.get("left_out_before", ()), *names])
    tensor = f"; {found['tensor']}" if "tensor" in found else ""
    flag = f"{found['variable']}=" if "variable" in found else "--megamoe.disable_passes "
    return [
        f"values are {right}, and wrong from {found['wrong_from']} on",
        f"culprit: {several} {', '.join(names)}{where}{places}{tensor}",
        f"to run without the culprit: {flag}{left_out}",
    ]


def _where(found: Finding) -> str:
    first = found["block"]
    return f"block {first}" if found["is_alone"] else f"blocks 1 to {first} together"
