"""Ranks agree on what a compiled callable launches before it runs for the first time.

Contract
    Two digests stand for a callable: of the user's collectives before any pass, per process group,
    and of our plan, "" where nothing is rewritten. At its first run a callable publishes both, with
    its position: how many of the user's collectives compiled callables launched there before.
    The user's collectives differ at one position: every rank ends with RankDisagreement, or, where
    its main thread waits in a collective, with a message and a status of its own, ten seconds
    at most after the second of them was published. So they do where one rank is to launch a forward
    pass's collectives in the place of another's backward pass, told as the first backward pass of a
    callable begins; where a rank waits for another that launched something else on the group since,
    by torch's own count of launches; and where it waits for one that left the process group.
    Only plans differ, or one rank launches in two calls what another launches in one: all ranks
    run the user's order. If a graph of one rank ends inside a rewritten program of another rank,
    every rank ends.
    A rank waits for others only before the first run of what is rewritten, or of what is as written
    on a group whose ranks ran something rewritten, and no longer than the process group's own
    timeout; then it names the ranks that did not come. A rank that is late or was killed is waited
    for. What all ranks ran before is compared with nothing, unless another rank runs something new.

Why rewritten collectives meet their like
    Compiled calls of all ranks of a group launch one sequence of the user's collectives on it;
    where they do not, these differ at some position, which is an error. A rank launches a
    callable's first rewritten call only if it knows that all ranks of the group publish, or run,
    that plan at this position: a plan speaks of all collectives of its program, so they end alike.
    Later calls ask nobody. A rank that compiles the program anew, and otherwise, while others run
    what was agreed on finds that they cannot change it any more, and stops the job.
    Which of several programs of one place runs may follow from a rank's own sizes. Unless ranks
    promise to have equal ones, such programs have one plan: where a second one is met, or one that
    is left whole, all of them run as the user wrote them from then on.
Why it cannot deadlock
    Only ranks of groups on which something is rewritten are asked, one another's partners in an
    exchange that only all of them can launch; on other groups the program runs as written, whatever
    the plan, and says so without a question: their ranks may need what follows this call.
    A rank that waits has launched all calls before this one in full, so no partner needs it to get
    here. Each other rank gets here and publishes; or has run this position without publishing,
    as it needed no consent, and then its watcher thread answers for it; or never gets here:
    its program differs, which is noticed, or it is gone, which is the launcher's to notice. Ranks
    of several such groups wait for all ranks that these connect, so that all decide from one set of
    answers: who waits has launched nothing, and can always leave the program whole.
What a rank may see
    Only what others published. Sizes, caches and clocks decide when it looks, never what it does.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import torch.distributed as dist

from moe_compile.errors import RankDisagreement
from moe_compile.runtime.answers import (
    REMEDY,
    Answers,
    answer,
    answers_key,
    backward_entry,
    conflict_of,
    entry,
    reach,
)
from moe_compile.runtime.call_log import CallLog, CompiledProgram, LaunchCount
from moe_compile.runtime.rank_store import (
    LEFT,
    STORE_ERRORS,
    UNCOMPARED,
    NewEntries,
    RankStore,
    default_store,
    open_prefix,
    ranks_to_compare,
    timeout_s,
)
from moe_compile.runtime.watcher import Watcher

LOG: Final = logging.getLogger(__name__)

POLL_S: Final = 0.02
SLOWEST_POLL_S: Final = 0.5
"""How often a rank that waits looks, at first and later: a late rank may be minutes late."""
SILENCE_S: Final = 30.0
"""After which a rank that waits says for whom, once; it waits on."""
HEARD_S: Final = 4.0
"""How long a rank that ends lets others hear of it: it may serve the store they read."""


SECOND_PLAN: Final = (
    "the program at {place} was decided differently for other sizes or in another mode; ranks may "
    "choose apart, so it runs as it is written. Set megamoe.equal_tokens if all ranks always have "
    "equally many tokens"
)

Calls = tuple[tuple[CallLog, CompiledProgram], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a callable may run."""

    calls: Calls = ()
    """What to note at each call; nothing where there is no other rank."""
    is_left_whole: bool = False
    """Whether it must run as the user wrote it though a rewritten form was compiled."""


class Agreement:
    """What this rank ran, and agreed on, within one default process group."""

    def __init__(self, store: dist.Store) -> None:
        """Begin to talk to the other ranks through `store`."""
        self.rank = dist.get_rank()
        self.default_store = store
        self.prefix = open_prefix(store, self.rank)
        self.store = RankStore(store, self.prefix)
        self.journals: dict[str, CallLog] = {}
        self._entries = NewEntries(self.store)
        self._leaving, self._left = NewEntries(self.store), set[int]()
        self._ahead: dict[str, list[dict[str, Any]]] = {}
        """What was published that goes beyond this rank's calls, by journal."""
        self.stopped = ""
        """Why all ranks end; "" while they need not."""
        self.has_raised = False
        """Whether the main thread knows."""
        self.has_seconds = False
        """Whether programs of one place have different plans."""
        self._watcher: Watcher | None = None

    def check(self, cause: BaseException | None = None) -> None:
        """Raise RankDisagreement, from `cause`, if some rank found that ranks disagree."""
        if self.stopped:
            self.has_raised = True
            raise RankDisagreement(self.stopped) from cause

    def meet(self, programs: Mapping[str, CompiledProgram]) -> Turn:
        """Publish what is about to run first, group -> program; wait where others must consent.

        Raises RankDisagreement.
        """
        calls = tuple(
            (journal, program)
            for group, program in programs.items()
            if (journal := self._journal(group)) is not None
        )
        whole = tuple((journal, replace(program, plan="")) for journal, program in calls)
        is_rewritten = calls != whole
        if any(journal.is_second(program) for journal, program in calls):
            LOG.warning("megamoe: %s", SECOND_PLAN.format(place=calls[0][1].places[0]))
            calls = whole
        asked = tuple(call for call in calls if call[0].must_ask(call[1]))
        self._publish(calls, asked)
        if asked and not self._ask(asked):
            calls = whole
        for journal, program in calls:
            journal.agree(program)
        self.has_seconds |= any(p.plan != plan for j, p in calls for plan in j.plans_of(p))
        return Turn(calls=calls, is_left_whole=is_rewritten and calls == whole)

    def enter_backward(self, calls: Calls) -> None:
        """Say that the backward pass of `calls` is about to launch what it launches.

        Raises RankDisagreement where another rank is to launch a forward pass's in its place.
        """
        self.check()
        for journal, program in calls:
            if program.is_differentiated:
                mine = backward_entry(self.rank, journal, program)
                if conflict := self._log(journal, mine):
                    self.end(conflict)

    def name(self, error: BaseException, calls: Calls) -> None:
        """Add to an error in the first run of `calls` where that is, and which ranks did not come.

        Raises RankDisagreement where that is what ended others, whose links broke.
        """
        self.check(error)
        newest = [(journal, journal.last(), program) for journal, program in calls]
        begun = [(journal, call.start, program) for journal, call, program in newest if call]
        with contextlib.suppress(*STORE_ERRORS):
            self.stopped = self.stopped or str(self.store.peek("stop") or "")
            self.check(error)
            answers = Answers(self.store, begun)
            if answers.missing():
                error.add_note(f"megamoe: {answers.silence()}")

    def end(self, message: str) -> NoReturn:
        """End all ranks, this one by RankDisagreement; for the threads that run the program."""
        self.has_raised = True
        raise RankDisagreement(self.stop(message, self.store))

    def first_of_group(self, group: str, key: str, value: str) -> tuple[int, str] | None:
        """Return the first rank to say what `key` is, and what it said, where that is not `value`.

        None where they say the same, or where there is nobody to compare with.
        """
        journal = self._journal(group)
        if journal is None:
            return None
        first = self.store.first(f"{journal.key}/{key}", [self.rank, value])
        return None if first[1] == value else (first[0], first[1])

    def stop(self, message: str, store: RankStore) -> str:
        """Tell all ranks why they end; return the reason, which another rank may have told first.

        `store` is the connection of the calling thread. Waits until others heard, not for long.
        """
        self.stopped = str(store.first("stop", message))
        store.append("heard", self.rank)
        self.wait_until_heard(store)
        return self.stopped

    def wait_until_heard(self, store: RankStore) -> None:
        """Wait until every rank that still watches has heard, at most `HEARD_S`."""
        deadline = time.monotonic() + HEARD_S
        while time.monotonic() < deadline and (
            store.length("heard") + store.length(LEFT) < store.length("watching")
        ):
            time.sleep(POLL_S)

    def _journal(self, group: str) -> CallLog | None:
        if group not in self.journals:
            ranks = ranks_to_compare(group)
            if not ranks:
                return None
            key = f"{group}/{','.join(map(str, ranks))}"
            self.journals[group] = CallLog(key, group, ranks, LaunchCount(group))
            if self._watcher is None:
                self._watcher = Watcher(self)
                self._watcher.start()
        return self.journals[group]

    def _publish(self, calls: Calls, asked: Calls) -> None:
        """Publish what is about to run; of `asked`, that it waits for others to consent."""
        asks = bool(asked)
        for journal, program in calls:
            mine = entry(self.rank, journal.publish(program), is_launched=not asks)
            if conflict := self._log(journal, mine):
                self.end(conflict)
        at = {j.key: j.end for j, _ in asked}
        for journal, program in calls:
            mine = answer(self.rank, program, at, is_launched=not asks)
            self.store.append(answers_key(journal.key, journal.end), mine)

    def _log(self, journal: CallLog, mine: dict[str, Any]) -> str:
        """Put an entry where others find it if it is the first of its kind; return conflicts.

        Another kind begins elsewhere, or has more collectives, or fewer.
        """
        waiting = {**mine, "is_launched": False}
        key = f"{journal.key}/{mine['start']}"
        kind = f"{mine['order']} {mine['launched']}" if mine["is_backward"] else mine["order"]
        first = mine if mine["is_backward"] else self.store.first(key, mine)
        if conflict := conflict_of(journal, first, waiting):
            return conflict
        if self.store.first(f"{key}/{kind}", self.rank) == self.rank:
            self.store.append(f"{journal.key}/log", mine)
        known = self._ahead.get(journal.key, []) + self._entries.of(f"{journal.key}/log")
        ahead = [e for e in known if e["rank"] != self.rank and reach(e) > mine["start"]]
        self._ahead[journal.key] = ahead
        return next(filter(None, (conflict_of(journal, e, waiting) for e in ahead)), "")

    def _ask(self, calls: Calls) -> bool:
        """Wait for all ranks that asked groups connect; return whether plans are alike."""
        answers = Answers(self.store, [(j, j.end, program) for j, program in calls])
        try:
            self._wait_for(answers, max(timeout_s(journal.group) for journal, _ in calls))
        except dist.DistError as error:
            raise RankDisagreement(
                f"the rank that serves the process group's store has ended, which this rank needs "
                f"to wait for others: {answers.silence()}"
            ) from error
        if answers.are_alike():
            return True
        if running := answers.ranks_that_run_rewritten():
            self.end(
                f"ranks {running} run a program rewritten that other ranks compiled anew, and "
                f"otherwise ({answers.said()}). {REMEDY}"
            )
        LOG.warning(
            "megamoe: ranks decided differently (%s): all run the program at %s as it is written",
            answers.said(),
            calls[0][1].places[0],
        )
        return False

    def _wait_for(self, answers: Answers, limit_s: float) -> None:
        """Wait until all have answered; RankDisagreement where that will not be."""
        began, pause = time.monotonic(), POLL_S
        is_said = False
        while not answers.look():
            self.check()
            waited_s = time.monotonic() - began
            if (left := self._ranks_that_left()) and (gone := left & answers.missing()):
                self.end(f"ranks {sorted(gone)} have left their program, but {answers.silence()}")
            if waited_s > limit_s:
                raise RankDisagreement(
                    f"{answers.silence()} within {limit_s:.0f} s: they are late, run something "
                    "else, as a program that is not compiled, or have ended; the process group "
                    "waits no longer"
                )
            if waited_s > SILENCE_S and not is_said:
                is_said = True
                LOG.warning("megamoe: waits on, for %.0f s: %s", waited_s, answers.silence())
            time.sleep(pause)
            pause = min(2 * pause, SLOWEST_POLL_S)

    def _ranks_that_left(self) -> set[int]:
        """Return the ranks whose program has ended, or that left the process group."""
        self._left.update(self._leaving.of(LEFT))
        return self._left


class _Current:
    """The agreement of the process group at hand."""

    agreement: Agreement | None = None


def current_agreement() -> Agreement | None:
    """Return the agreement of the default process group, begun if need be; None without one."""
    store, known = default_store(), _Current.agreement
    if store is None or dist.get_backend() in UNCOMPARED:
        return None
    if known is None or known.default_store is not store:
        _Current.agreement = known = Agreement(store)
    return known
