"""What ranks publish of a call, what they answer, and in which words they disagree."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

from moe_compile.ops.journal import Journal, Program
from moe_compile.ops.rank_store import RankStore

REMEDY: Final = (
    "Running on would corrupt data silently. Compare the ranks' programs, options, sources and "
    "torch versions (TORCH_LOGS=+moe_compile)."
)
Position = tuple[str, int]
"""Key of a journal, and which call."""


def entry(rank: int, position: int, program: Program, *, is_launched: bool) -> dict[str, Any]:
    """Return what a rank publishes of a call; `is_launched` where it does not wait for others."""
    return {"rank": rank, "position": position, "is_launched": is_launched, **program.as_json()}


def answers_key(journal: str, position: int) -> str:
    """Return the list where ranks say by which plan they run a call."""
    return f"{journal}/{position}/answers"


def conflict_of(journal: Journal, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Return why the ranks of two entries for one call must end; "" where they need not."""
    call = f"call {mine['position']} of compiled code on process group {journal.group!r}"
    who = f"ranks {theirs['rank']} and {mine['rank']} (of ranks {journal.ranks})"
    if theirs["order"] != mine["order"]:
        return (
            f"{who} launch different collectives in {call}; the first difference is "
            f"{_first_difference(theirs, mine)}. {REMEDY}"
        )
    is_running = any(e["is_launched"] and e["plan"] for e in (theirs, mine))
    if theirs["plan"] != mine["plan"] and is_running:
        return (
            f"{who} launch the same collectives in {call}, but rewrote them differently, and "
            f"one runs already what was agreed before. {REMEDY}"
        )
    return ""


def _first_difference(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    pairs = itertools.zip_longest(theirs["collectives"], mine["collectives"])
    for index, (their, our) in enumerate(pairs):
        if their != our:
            said = (_said(theirs, index), _said(mine, index))
            return f"collective {index + 1}: {said[0]}, {said[1]}"
    return "unknown"


def _said(one: Mapping[str, Any], index: int) -> str:
    if index >= len(one["collectives"]):
        return f"rank {one['rank']} launches none"
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
        groups = sorted(f"call {call} of compiled code on {key}" for key, call in self._open)
        return (
            f"some ranks did not reach {'; '.join(groups)} (group/ranks) within {waited_s:.0f} s: "
            "they are late, run something else, as a program that is not compiled, or have ended"
        )
