"""What ranks publish of a call, what they answer, and in which words they disagree."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final

from moe_compile.runtime.call_log import Journal, Program
from moe_compile.runtime.rank_store import RankStore

REMEDY: Final = (
    "Running on would corrupt data silently. Compare the ranks' programs, options, sources and "
    "torch versions (TORCH_LOGS=+moe_compile)."
)
Position = tuple[str, int]
"""Key of a journal, and where a call begins."""


def entry(rank: int, start: int, program: Program, *, is_launched: bool) -> dict[str, Any]:
    """Return what a rank publishes of a call; `is_launched` where it does not wait for others."""
    return {"rank": rank, "start": start, "is_launched": is_launched, **program.as_json()}


def answers_key(journal: str, start: int) -> str:
    """Return the list where ranks say by which plan they run what begins, or goes on, there."""
    return f"{journal}/{start}/answers"


def conflict_of(journal: Journal, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Return why the ranks of two entries must end; "" where they need not.

    They may cut the user's collectives into other calls, as long as nothing rewritten is cut.
    """
    where = f"in compiled code on process group {journal.group!r}"
    who = f"ranks {theirs['rank']} and {mine['rank']} (of ranks {journal.ranks})"
    for position, their, our in _common(theirs, mine):
        if theirs["collectives"][their] != mine["collectives"][our]:
            return (
                f"{who} launch different collectives {where}; the first difference is collective "
                f"{position + 1}: {_said(theirs, their)}, {_said(mine, our)}. Where a rank ran "
                f"some eagerly, these were not counted. {REMEDY}"
            )
    is_running = any(e["is_launched"] and e["plan"] for e in (theirs, mine))
    is_cut = (theirs["start"], theirs["order"]) != (mine["start"], mine["order"])
    if is_running and (is_cut or theirs["plan"] != mine["plan"]):
        return (
            f"{who} launch the same collectives {where} from collective "
            f"{max(theirs['start'], mine['start']) + 1} on, but rewrote them differently"
            f"{', in other graphs' if is_cut else ''}, and one runs already what was agreed "
            f"before. {REMEDY}"
        )
    return ""


def _common(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Yield the positions that two entries have in common, and the place in each of them."""
    starts = theirs["start"], mine["start"]
    end = min(e["start"] + len(e["collectives"]) for e in (theirs, mine))
    for position in range(max(starts), end):
        yield position, position - starts[0], position - starts[1]


def _said(one: Mapping[str, Any], index: int) -> str:
    place = f" at {one['places'][index]}" if one["places"][index] else ""
    return f"rank {one['rank']} launches {one['collectives'][index]}{place}"


class Answers:
    """All ranks' answers to one call, and to the calls of other groups that these ranks are in."""

    def __init__(self, store: RankStore, calls: Mapping[Position, int]) -> None:
        """Ask about `calls`: position -> number of ranks that answer."""
        self._store = store
        self._open = dict(calls)
        self._answers: dict[Position, list[dict[str, Any]]] = {}

    def look(self) -> bool:
        """Take in what is new; return whether everybody has answered."""
        for position, num_ranks in sorted(self._open.items()):
            key = answers_key(*position)
            if self._store.length(key) < num_ranks:
                continue
            found = self._store.read(key, range(1, num_ranks + 1))
            if found is None:
                continue
            del self._open[position]
            self._answers[position] = found
            for answer in found:
                for other, (call, ranks) in sorted(answer["at"].items()):
                    if (other, call) not in self._answers:
                        self._open[other, call] = ranks
        return not self._open

    def are_alike(self) -> bool:
        """Return whether all ranks of each call have one plan for it."""
        return all(len({a["plan"] for a in found}) == 1 for found in self._answers.values())

    def ranks_by_plan(self) -> dict[str, list[int]]:
        """Return plan -> the ranks that have it."""
        found: dict[str, set[int]] = {}
        for answer in itertools.chain.from_iterable(self._answers.values()):
            found.setdefault(answer["plan"], set()).add(answer["rank"])
        return {plan: sorted(found[plan]) for plan in sorted(found)}

    def ranks_that_run_rewritten(self) -> list[int]:
        """Return the ranks that no longer wait, and run another order than the user's."""
        answers = itertools.chain.from_iterable(self._answers.values())
        return sorted({a["rank"] for a in answers if a["is_launched"] and a["plan"]})

    def said(self) -> str:
        """Return which ranks have which plan."""
        return ", ".join(
            f"ranks {ranks}: {f'plan {plan[:8]}' if plan else 'nothing rewritten'}"
            for plan, ranks in self.ranks_by_plan().items()
        )

    def silence(self, waited_s: float) -> str:
        """Return what to say when some have not answered for so long."""
        groups = sorted(f"collective {at + 1} of compiled code on {key}" for key, at in self._open)
        return (
            f"some ranks did not reach {'; '.join(groups)} (group/ranks) within {waited_s:.0f} s: "
            "they are late, run something else, as a program that is not compiled, or have ended"
        )
