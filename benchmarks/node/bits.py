"""Section `bits`: layers compiled by megamoe equal the eager layers bit for bit.

Contract
    A program for every rewrite and option runs eagerly and compiled.
    A difference, an error, and a program that is not rewritten are failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from moe_compile.check.sections import Record, say
from moe_compile.check.team import Team
from moe_compile.testing.programs.every_rewrite import Item, items_for, run_item
from moe_compile.testing.programs.judge import Outcome, judgement_of
from moe_compile.testing.programs.run import RankFindings

NEEDS_S: Final = {"cpu": 20.0, "cuda": 10.0}
"""Seconds that one program takes at most, but for a slow machine."""


def check_bits(team: Team, names: Sequence[str] = ()) -> None:
    """Run the section: all programs for as many ranks, or those of `names`."""
    for item in items_for(team.num_ranks):
        if not names or item.name in names:
            check_item(team, item)


def check_item(team: Team, item: Item) -> None:
    """Run and judge one program."""
    team.run(
        item.name,
        partial(run_item, item),
        partial(judge_item, item),
        num_ranks=item.num_ranks,
        needs_s=NEEDS_S[team.device],
    )


def judge_item(item: Item, record: Record, found: list[tuple[RankFindings, float]]) -> None:
    """Record the ranks' findings on an item."""
    judgement = judgement_of([findings for findings, _ in found])
    seconds = max(seconds for _, seconds in found)
    record.add_row(
        {
            "program": item.name,
            "ranks": len(found),
            "options": item.options,
            "found": judgement.kind.value,
            "verdicts": list(judgement.verdicts),
            "seconds": round(seconds, 1),
            "cpu_s": round(max(findings.cpu_s for findings, _ in found), 1),
        }
    )
    is_same = record.expect(judgement.kind is Outcome.SAME, item.name, judgement.detail)
    if is_same:
        why = f"it was not rewritten: {', '.join(judgement.verdicts) or 'nothing was compiled'}"
        record.expect(judgement.is_chunked, item.name, why)
    say(f"bits: {item.name}: {judgement.kind.value} in {seconds:.1f} s")
