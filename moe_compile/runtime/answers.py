"""Entries that ranks publish of calls, their answers, and messages of disagreement."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from moe_compile.runtime.call_log import CallLog, CompiledProgram, ProgramCall
from moe_compile.runtime.rank_store import RankStore

REMEDY: Final = (
    "Running on would corrupt data silently. Compare the ranks' programs, options, sources and "
    "torch versions (TORCH_LOGS=+moe_compile)."
)
ACROSS: Final = "across process groups, because their own programs differ in this order"
Position = tuple[str, int]
"""Key of a journal, and the position where a call begins."""


ONE_SIDED: Final = (
    "If a layer runs on some ranks only, for example under `if images.any()`, let all ranks run "
    "it, with zero rows on ranks that have none."
)


def entry(rank: int, call: ProgramCall, *, is_launched: bool) -> dict[str, Any]:
    """Return a rank's entry for a call; `is_launched` where it does not wait for others."""
    return {
        "rank": rank, "start": call.start, "launched": call.launched, "is_again": call.is_again,
        "is_backward": False, "is_launched": is_launched, **call.program.as_json(),
    }  # fmt: skip


def backward_entry(rank: int, journal: CallLog, program: CompiledProgram) -> dict[str, Any]:
    """Return a rank's entry as the backward pass of `program`, with collectives, begins."""
    return {
        "rank": rank, "start": journal.end, "launched": journal.count.exact(), "is_again": False,
        "is_backward": True, "is_launched": False, "plan": "", "order": "backward",
        "collectives": [], "places": list(program.places), "left": "",
    }  # fmt: skip


def reach(one: Mapping[str, Any]) -> int:
    """Return the position behind an entry; that of a backward pass is where forward goes on."""
    return int(one["start"]) + max(1, len(one["collectives"]))


def answers_key(journal: str, start: int) -> str:
    """Return the key of the answers on the call that begins, or goes on, at `start`."""
    return f"{journal}/{start}/answers"


def conflict_of(journal: CallLog, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Return why the ranks of two entries must end; "" where they need not.

    They may cut the user's collectives into other calls, as long as nothing rewritten is cut.
    """
    if theirs["is_backward"] or mine["is_backward"]:
        return _conflict_of_passes(journal, theirs, mine)
    where = f"in compiled code on process group {journal.group!r}"
    who = f"ranks {theirs['rank']} and {mine['rank']} (of ranks {journal.ranks})"
    for position, their, our in _common(theirs, mine):
        if theirs["collectives"][their] != mine["collectives"][our]:
            return (
                f"{who} launch different collectives {where}; the first difference is collective "
                f"{position + 1}: {_said(theirs, their)}, {_said(mine, our)}. Collectives that a "
                f"rank ran eagerly were not counted. {REMEDY}"
            )
    is_running = any(e["is_launched"] and e["plan"] for e in (theirs, mine))
    is_cut = (theirs["start"], theirs["order"]) != (mine["start"], mine["order"])
    if is_running and (is_cut or theirs["plan"] != mine["plan"]):
        return (
            f"{who} launch the same collectives {where} from collective "
            f"{max(theirs['start'], mine['start']) + 1} on, but rewrote them "
            f"differently{', in different graphs' if is_cut else ''}, and one of them already runs "
            f"the rewrite that ranks agreed on before{_left(theirs, mine)}. {REMEDY}"
        )
    return ""


def _left(*entries: Mapping[str, Any]) -> str:
    """Return the rewrites that options asked for and did not get, by rank."""
    return "".join(f"; on rank {e['rank']}: {e['left']}" for e in entries if e["left"])


def _conflict_of_passes(
    journal: CallLog, theirs: Mapping[str, Any], mine: Mapping[str, Any]
) -> str:
    """Return why ranks must end, one of them in a backward pass; "" where they need not."""
    forward, back = (mine, theirs) if theirs["is_backward"] else (theirs, mine)
    if forward["is_backward"] or forward["is_again"] or not _meet(forward, back):
        return ""
    first, last = forward["start"] + 1, reach(forward)
    place, begun = forward["places"][-1], back["places"][0]
    return (
        f"ranks {forward['rank']} and {back['rank']} (of ranks {journal.ranks}) launch different "
        f"numbers of collectives in compiled code on process group {journal.group!r}. Rank "
        f"{forward['rank']} runs a forward pass with collectives {first} to {last}, the last of "
        f"them {forward['collectives'][-1]} at {place}. Rank {back['rank']} has launched "
        f"{back['start']} collectives, and begins the backward pass of the program at {begun}. "
        f"{ONE_SIDED} {REMEDY}"
    )


def conflict_of_counts(journal: CallLog, theirs: Mapping[str, Any], rank: int) -> str:
    """Return why all must end where a rank waits to launch `theirs`; "" where they need not.

    The collectives that `rank`, this one, has since launched on the group would meet `theirs`, and
    differ.
    """
    before, most = theirs["launched"], journal.count.at_most()
    if theirs["is_launched"] or theirs["is_backward"] or before is None or most is None:
        return ""
    # read before this rank's position; a watcher asks while the main thread may launch
    launched = journal.count.exact(is_between_launches=False) if most > before else None
    is_there = journal.end > theirs["start"] or theirs["start"] in journal.published
    if is_there or launched is None or launched <= before:
        return ""
    return (
        f"ranks {theirs['rank']} and {rank} (of ranks {journal.ranks}) are at different places of "
        f"their programs. Rank {theirs['rank']} waits until all ranks are ready to launch "
        f"collectives {theirs['start'] + 1} to {reach(theirs)} of compiled code on process group "
        f"{journal.group!r}, the first of them {theirs['collectives'][0]} at "
        f"{theirs['places'][0]}. Rank {rank} ran compiled code up to collective {journal.end}, and "
        f"has since launched {launched - before} other collectives on this group, in a backward "
        f"pass or in code that is not compiled. {ONE_SIDED} {REMEDY}"
    )


def _meet(forward: Mapping[str, Any], back: Mapping[str, Any]) -> bool:
    """Whether some collective of `forward` and one of `back` would be each other's partners.

    `launched` of `forward` may be more than there were.
    """
    if forward["start"] < back["start"]:
        return bool(reach(forward) > back["start"])
    if forward["launched"] is None or back["launched"] is None:
        return False
    return bool(forward["launched"] <= back["launched"])


def _common(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Yield the positions that two entries have in common, and the place in each of them."""
    starts = theirs["start"], mine["start"]
    end = min(e["start"] + len(e["collectives"]) for e in (theirs, mine))
    for position in range(max(starts), end):
        yield position, position - starts[0], position - starts[1]


def _said(one: Mapping[str, Any], index: int) -> str:
    place = f" at {one['places'][index]}" if one["places"][index] else ""
    return f"rank {one['rank']} launches {one['collectives'][index]}{place}"


def answer(
    rank: int, program: CompiledProgram, at: Mapping[str, int], *, is_launched: bool
) -> dict[str, Any]:
    """Return a rank's answer: its plan, and where it waits for others, by journal."""
    return {
        "rank": rank, "plan": program.plan, "num": len(program.collectives), "left": program.left,
        "is_launched": is_launched, "at": dict(at),
    }  # fmt: skip


class Answers:
    """All ranks' answers to one call, and to the calls of other groups that these ranks are in."""

    def __init__(
        self, store: RankStore, calls: Iterable[tuple[CallLog, int, CompiledProgram]]
    ) -> None:
        """Ask about `calls`, each with its log, start and program."""
        self._store = store
        self._asked = list(calls)
        self._open = {(journal.key, start) for journal, start, _ in self._asked}
        self._answers: dict[Position, list[dict[str, Any]]] = {}

    def look(self) -> bool:
        """Read new answers; return whether everybody has answered."""
        for position in sorted(self._open):
            key, num_ranks = answers_key(*position), len(_ranks_of(position))
            if self._store.length(key) < num_ranks:
                continue
            found = self._store.read(key, range(1, num_ranks + 1))
            if found is None:
                continue
            self._open.remove(position)
            self._answers[position] = found
            for other in itertools.chain.from_iterable(a["at"].items() for a in found):
                if other not in self._answers:
                    self._open.add(other)
        return not self._open

    def missing(self) -> set[int]:
        """Return the ranks that have not answered, as far as is known now."""
        return {
            rank
            for position in self._open
            for rank in set(_ranks_of(position)) - self._ranks_that_answered(position)
        }

    def _ranks_that_answered(self, position: Position) -> set[int]:
        key = answers_key(*position)
        places = range(1, self._store.length(key) + 1)
        found = [self._store.peek(f"{key}/{place}") for place in places]
        return {one["rank"] for one in found if one is not None}

    def are_alike(self) -> bool:
        """Return whether all ranks of each call have one plan for it."""
        return all(len({a["plan"] for a in found}) == 1 for found in self._answers.values())

    def ranks_that_run_rewritten(self) -> list[int]:
        """Return the ranks that no longer wait, and run a rewritten order."""
        answers = itertools.chain.from_iterable(self._answers.values())
        return sorted({a["rank"] for a in answers if a["is_launched"] and a["plan"]})

    def said(self) -> str:
        """Return a text of the plans by rank, with the reason for those left out."""
        answers = list(itertools.chain.from_iterable(self._answers.values()))
        are_as_long = len({one["num"] for one in answers}) == 1
        found: dict[str, set[int]] = {}
        for one in answers:
            plan = f"plan {one['plan'][:8]}" if one["plan"] else "nothing rewritten"
            long = "" if are_as_long else f", {one['num']} collectives"
            left = f" ({one['left']})" if one["left"] else ""
            found.setdefault(f"{plan}{long}{left}", set()).add(one["rank"])
        if len(found) == 1:  # and yet not alike
            return f"{next(iter(found))}, in different orders {ACROSS}"
        return "; ".join(f"ranks {sorted(found[what])}: {what}" for what in sorted(found))

    def silence(self) -> str:
        """Return a text of the collectives this rank waits at, and of the missing ranks."""
        regions = "; ".join(
            f"collective {start + 1} of compiled code on process group {journal.group!r} of ranks "
            f"{journal.ranks}, at {program.places[0]}"
            for journal, start, program in self._asked
        )
        return f"ranks {sorted(self.missing())} did not reach {regions}"


def _ranks_of(position: Position) -> list[int]:
    """Return the ranks of a journal, which its key names."""
    return [int(rank) for rank in position[0].rpartition("/")[2].split(",")]
