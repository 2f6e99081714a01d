"""Ranks agree on the collectives of a compiled callable before it runs for the first time.

Contract
    Two digests stand for a callable: of the user's collectives before any pass, per process group,
    and of our plan, "" where nothing is rewritten. At its first run a callable publishes both, with
    its position: the number of the user's collectives that compiled callables launched there
    before.
    If the user's collectives differ at one position, every rank ends with RankDisagreement. Where
    its main thread waits in a collective, it ends with a message and a status of its own, ten
    seconds at most after the second of them was published. Every rank also ends in three more
    cases: one rank is to launch a forward pass's collectives in the place of another's backward
    pass, which is published as the first backward pass of a callable begins; a rank waits for
    another that has since launched something else on the group, by torch's own count of launches; a
    rank waits for one that left the process group.
    If only plans differ, or one rank launches in two calls the collectives that another launches in
    one, all ranks run the user's order. If a graph of one rank ends inside a rewritten program of
    another rank, every rank ends.
    A rank waits for others only before the first run of a rewritten program, or of an unchanged one
    on a group whose ranks ran a rewritten one, and no longer than the process group's own timeout;
    then it names the ranks that did not come. It also waits for a rank that is late or was killed.
    Programs that all ranks ran before are not compared again, unless another rank runs a new one.

Why rewritten collectives meet their like
    Compiled calls of all ranks of a group launch one sequence of the user's collectives on it;
    where they do not, these differ at some position, which is an error. A rank launches a
    callable's first rewritten call only if it knows that all ranks of the group publish, or run,
    that plan at this position: a plan covers all collectives of its program, so they end alike.
    Later calls ask nobody. A rank that compiles the program anew, with another plan, while others
    run the agreed one, finds that they cannot change it any more, and stops the job.
    A rank's own sizes may choose between several programs of one place. Unless ranks promise to
    have equal sizes, such programs must have one plan: once a second plan, or none, is met there,
    all of them run as the user wrote them.
Why it cannot deadlock
    Only ranks of groups on which something is rewritten are asked, one another's partners in an
    exchange that only all of them can launch. On other groups the program runs as written, whatever
    the plan, and publishes so without a question: their ranks may need the launches that follow
    this call.
    A rank that waits has launched all calls before this one in full, so no partner needs it to get
    here. Each other rank gets here and publishes; or has run this position without publishing,
    as it needed no consent, and then its watcher thread answers for it; or never gets here:
    its program differs, which is noticed, or it is gone, which is the launcher's to notice. Ranks
    of several such groups wait for all ranks that these connect, so that all decide from one set of
    answers: a waiting rank has launched nothing, and can always leave the program whole.
What a rank may read
    Only what others published. Sizes, caches and clocks decide when it looks, not what it decides.
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
"""Seconds between looks of a waiting rank, at first and later: ranks may be minutes late."""
SILENCE_S: Final = 30.0
"""Seconds after which a waiting rank names, once, the ranks it waits for; it waits on."""
HEARD_S: Final = 4.0
"""Seconds that a rank which ends lets others hear of it: it may serve the store they read."""


SECOND_PLAN: Final = (
    "megamoe rewrote the program at {place} differently for other sizes or in another mode. Ranks "
    "might choose different rewrites, so the program runs as written. Set megamoe.equal_tokens = "
    "true if all ranks have the same number of tokens in every step"
)

Calls = tuple[tuple[CallLog, CompiledProgram], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The form in which a callable may run."""

    calls: Calls = ()
    """Calls to note each time it runs; () where there is no other rank."""
    is_left_whole: bool = False
    """Whether it must run as the user wrote it though a rewritten form was compiled."""


class Agreement:
    """Programs that this rank ran or agreed on within one default process group."""

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
        """Published entries that go beyond this rank's calls, by journal."""
        self.stopped = ""
        """Why all ranks end; "" while they need not."""
        self.has_raised = False
        """Whether the main thread has raised the disagreement."""
        self.has_seconds = False
        """Whether programs of one place have different plans."""
        self._watcher: Watcher | None = None

    def check(self, cause: BaseException | None = None) -> None:
        """Raise RankDisagreement, from `cause`, if some rank found that ranks disagree."""
        if self.stopped:
            self.has_raised = True
            raise RankDisagreement(self.stopped) from cause

    def meet(self, programs: Mapping[str, CompiledProgram]) -> Turn:
        """Publish programs, group -> program, before their first run; wait if others must consent.

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
        """Publish that the backward pass of `calls` is about to launch its collectives.

        Raises RankDisagreement where another rank is to launch those of a forward pass there.
        """
        self.check()
        for journal, program in calls:
            if program.is_differentiated:
                mine = backward_entry(self.rank, journal, program)
                if conflict := self._log(journal, mine):
                    self.end(conflict)

    def name(self, error: BaseException, calls: Calls) -> None:
        """Add to an error in the first run of `calls` where that is, and which ranks did not come.

        Raises RankDisagreement where a disagreement ended other ranks and broke their links.
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
        """Return the rank that set `key` first, and its value, where that is not `value`.

        None where the values are equal, or where there is no other rank.
        """
        journal = self._journal(group)
        if journal is None:
            return None
        first = self.store.first(f"{journal.key}/{key}", [self.rank, value])
        return None if first[1] == value else (first[0], first[1])

    def stop(self, message: str, store: RankStore) -> str:
        """Publish the reason why all ranks end; return it, or the one another rank published first.

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
        """Publish calls that are about to run; those of `asked` wait for others to consent."""
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
                "this rank cannot wait for other ranks, because the rank that serves the process "
                f"group's store has ended: {answers.silence()}"
            ) from error
        if answers.are_alike():
            return True
        if running := answers.ranks_that_run_rewritten():
            self.end(
                f"ranks {running} already run a rewritten program, and other ranks have compiled "
                f"it again, with another result ({answers.said()}). {REMEDY}"
            )
        LOG.warning(
            "megamoe: ranks decided differently (%s): all ranks run the program at %s unchanged",
            answers.said(),
            calls[0][1].places[0],
        )
        return False

    def _wait_for(self, answers: Answers, limit_s: float) -> None:
        """Wait until all have answered; raise RankDisagreement where some never will."""
        began, pause = time.monotonic(), POLL_S
        is_said = False
        while not answers.look():
            self.check()
            waited_s = time.monotonic() - began
            if (left := self._ranks_that_left()) and (gone := left & answers.missing()):
                self.end(
                    f"ranks {sorted(gone)} have ended their program or left the process group, and "
                    f"{answers.silence()}"
                )
            if waited_s > limit_s:
                raise RankDisagreement(
                    f"{answers.silence()} within {limit_s:.0f} s, the time-out of the process "
                    "group: these ranks are late, run a different program (one that is not "
                    "compiled, for example), or have ended"
                )
            if waited_s > SILENCE_S and not is_said:
                is_said = True
                LOG.warning(
                    "megamoe: this rank has waited for %.0f s and goes on waiting: %s",
                    waited_s,
                    answers.silence(),
                )
            time.sleep(pause)
            pause = min(2 * pause, SLOWEST_POLL_S)

    def _ranks_that_left(self) -> set[int]:
        """Return the ranks whose program has ended, or that left the process group."""
        self._left.update(self._leaving.of(LEFT))
        return self._left


class _Current:
    """The agreement of the current default process group."""

    agreement: Agreement | None = None


def current_agreement() -> Agreement | None:
    """Return the agreement of the default process group, begun if need be; None without one."""
    store, known = default_store(), _Current.agreement
    if store is None or dist.get_backend() in UNCOMPARED:
        return None
    if known is None or known.default_store is not store:
        _Current.agreement = known = Agreement(store)
    return known
