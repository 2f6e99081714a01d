"""Where megamoe's values are wrong: which pass makes them so, in which block, and in which region.

Contract
    Every trial is one more form of the job, with some passes left out, of all regions or of some,
    or in some blocks alone.
    Passes are those that changed a graph, or all where the wrong form did not come to its end. They
    are tried in the order of the pipeline; the needed ones are left out after all others, since
    without them values may be wrong for another reason.
    Regions are those that a right form found, by their names in the report. A pass that is left out
    of all of them leaves each as if the pass were absent.
    All ranks make the same trials: each goes by the verdict of rank 0. The findings are `culprit`
    in the section's file.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from moe_compile.check.forms import Form, without_passes
from moe_compile.check.same import OutOfTime, Trials, check_same
from moe_compile.check.search import Culprit, find_culprit, first_wrong, said_of
from moe_compile.check.sections import Record
from moe_compile.config import pass_in_region
from passes.pipeline import LEVELS, names_by_region, outside_rewrites

NO_PASS: Final = (
    "values are also wrong when all passes are left out, so no pass is at fault. Compare with "
    '--compile.backend inductor, and run with TORCH_LOGS="+moe_compile"'
)
NOT_REPEATED: Final = (
    "the program as written does not repeat its own bits, so nothing can be compared"
)
OUT_OF_TIME: Final = "the time limit ended the search before a pass was found"
OUT_OF_TIME_LATER: Final = "the time limit ended the search before a region was found"
NOT_BY_REGION: Final = "pass {} changes whole graphs, not single regions"
OUTSIDE: Final = "values stay wrong when {} is left out of every region"
RIGHT_THERE: Final = "values are right there with {} alone"
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

    def without(left_out: Sequence[str]) -> Form:
        return without_passes(wrong, trials.config, left_out, said_of(names, left_out))

    def is_right(left_out: frozenset[str]) -> bool:
        return trials.is_right(without([n for n in names if n in left_out]), needs_s)

    culprit = find_culprit(names, is_right)
    if culprit is None:
        return {"why": NO_PASS}
    places = _places(trials, without(culprit.names))
    left_out_before = list(trials.config.disable_passes)
    found = {**_named(culprit), "places": places, "left_out_before": left_out_before}
    try:
        if goes_into_blocks:
            found |= _block(trials, wrong, needs_s)
        found |= _regions(trials, _in_block(wrong, found), culprit, places, needs_s)
    except OutOfTime:
        found["no_region"] = OUT_OF_TIME_LATER
    return found


def _places(trials: Trials, form: Form) -> list[list[str]]:
    """Return name and place of each region that a form found, on all ranks; it was run."""
    record = trials.team.record
    said = None if record is None else json.dumps(_row(record, form).get("places", []))
    places: list[list[str]] = json.loads(trials.team.tell(f"places/{form.name}", said))
    return places


def _in_block(wrong: Form, found: Finding) -> Form:
    """Return the wrong form in the blocks that were found; everywhere if none were sought."""
    if "block" not in found:
        return wrong
    last = found["block"]
    blocks = frozenset({last - 1} if found["is_alone"] else range(last))
    return replace(wrong, name=f"{wrong.name}, in {_where(found)}", blocks=blocks)


def _regions(
    trials: Trials, wrong: Form, culprit: Culprit, places: Sequence[Sequence[str]], needs_s: float
) -> dict[str, Any]:
    """Return the regions in which the passes make values wrong, and where each is."""
    last = wrong

    def is_right(left_out: Sequence[str], said: str) -> bool:
        nonlocal last
        form = without_passes(wrong, trials.config, left_out, said)
        if is_good := trials.is_right(form, needs_s):
            last = form
        return is_good

    names = list(dict.fromkeys(name for name, _ in places))
    found = find_regions(culprit.names, names, is_right)
    return {**found, "places": (last is not wrong and _places(trials, last)) or places}


def find_regions(
    passes: Sequence[str], regions: Sequence[str], is_right: Callable[[Sequence[str], str], bool]
) -> dict[str, Any]:
    """Return `regions`: pass -> those in which it makes a result wrong, or why it has none.

    `is_right` tells whether a result is right without some entries of `disable_passes`, and is
    given words for them. With one of `passes` alone the result is wrong, and right without any.
    """
    found, left = dict[str, list[str]](), list[str]()
    for name in passes:
        others = [other for other in passes if other != name]

        def is_right_without(
            left_out: frozenset[str], name: str = name, others: Sequence[str] = others
        ) -> bool:
            entries = [pass_in_region(name, region) for region in regions if region in left_out]
            said = f"{name} {said_of(regions, left_out, 'regions') or 'in all regions'}"
            words = [*([f"without {', '.join(others)}"] if others else []), said]
            return is_right([*others, *entries], ", ".join(words))

        if name not in names_by_region():
            left.append(NOT_BY_REGION.format(name))
        elif len(regions) == 1 and not others:
            found[name] = list(regions)
        elif others and is_right_without(frozenset()):
            left.append(RIGHT_THERE.format(name))
        elif (culprit := find_culprit(regions, is_right_without)) is not None:
            found[name] = list(culprit.names)
        else:
            left.append(OUTSIDE.format(name))
    return {"regions": found, **({"no_region": "; ".join(left)} if left else {})}


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
    tensor = f"; {found['tensor']}" if "tensor" in found else ""
    flag = f"{found['variable']}=" if "variable" in found else "--megamoe.disable_passes "
    left_out = shlex.quote(",".join([*found.get("left_out_before", ()), *_entries(found)]))
    said = [
        f"values are {right}, and wrong from {found['wrong_from']} on",
        f"culprit: {several} {', '.join(names)}{where}{_at(found)}{tensor}",
        f"to run without the culprit: {flag}{left_out}",
    ]
    if why := found.get("no_region"):
        several = "more regions are" if found.get("regions") else "region is"
        said.append(f"no {several} named: {why}")
    return said


def _entries(found: Finding) -> list[str]:
    """Return the entries of `disable_passes` that leave the culprit out, and nothing more."""
    regions: Mapping[str, Sequence[str]] = found.get("regions", {})
    return [
        entry
        for name in found["names"]
        for entry in ([pass_in_region(name, r) for r in regions.get(name, ())] or [name])
    ]


def _at(found: Finding) -> str:
    """Return the regions of the culprit with their places, or all places where regions are."""
    places: Sequence[Sequence[str]] = found.get("places", [])
    regions: Mapping[str, Sequence[str]] = found.get("regions", {})
    if not regions:
        others = list(dict.fromkeys(place for _, place in places))
        return f" (regions at {'; '.join(others)})" if others else ""
    said = []
    for name, own in regions.items():
        at = [
            f"{one} ({'; '.join(dict.fromkeys(place for each, place in places if each == one))})"
            for one in own
        ]
        said.append(f"{f'{name} ' if len(found['names']) > 1 else ''}in {' and in '.join(at)}")
    return f", {'; '.join(said)}"


def _where(found: Finding) -> str:
    first = found["block"]
    return f"block {first}" if found["is_alone"] else f"blocks 1 to {first} together"
