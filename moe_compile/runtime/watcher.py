"""A thread that notices disagreement while the main thread cannot.

Contract
    Reads the entries that other ranks publish, and compares them with the calls of this rank at the
    same position; answers for a main thread that ran on without asking. Prints the difference of a
    disagreement, on any rank, to stderr; if the main thread does not raise it soon, ends the
    process.
    Ends in silence with the process, the process group or its store. Waits for nobody.

Where nothing moves, the last collectives of a group are compared: of code that ran before too.
As long as collectives are launched, only their count is read, and nothing is published. After
`STILL_S` without one, the first rank of a group publishes its last ones, by torch's flight
recorder, and each other rank that stands still compares. A difference is a real launch: a rank that
is late launched nothing else. Without a recorder nothing is known.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from moe_compile.runtime.answers import (
    ONE_SIDED,
    REMEDY,
    answer,
    answers_key,
    conflict_of,
    conflict_of_counts,
    entry,
    reach,
)
from moe_compile.runtime.call_log import CallLog, CompiledProgram, ProgramCall
from moe_compile.runtime.rank_store import (
    LEFT,
    STORE_ERRORS,
    NewEntries,
    RankStore,
    default_store,
    is_served,
)

if TYPE_CHECKING:
    from moe_compile.runtime.agreement import Agreement

LOG: Final = logging.getLogger(__name__)

QUICK_S: Final = 0.1
SLOW_S: Final = 2.0
"""Seconds between two looks, after news and after none for a while: a job of a thousand ranks asks
its store a few thousand small questions in that time."""
GRACE_S: Final = 2.0
"""Seconds the main thread has to raise the disagreement itself."""
EXIT_STATUS: Final = 79
"""Exit status where ranks disagree while the main thread waits in a collective."""


class Watcher(threading.Thread):
    """The watcher thread of one rank (see the module docstring)."""

    def __init__(self, agreement: Agreement) -> None:
        """Prepare to watch for `agreement`."""
        super().__init__(name="megamoe-watcher", daemon=True)
        self._agreement = agreement
        self._store = RankStore(agreement.default_store, agreement.prefix)
        self._ended = threading.Event()
        self._entries = NewEntries(self._store)
        self._answered: set[tuple[str, int]] = set()
        self._pending: list[tuple[CallLog, dict[str, Any]]] = []
        self._standstill = Standstill(agreement.rank, self._store)
        self._store.append("watching", agreement.rank)
        atexit.register(self.end)  # a thread that runs on would abort the interpreter's shutdown

    def end(self) -> None:
        """Stop watching, and tell those who wait for this rank."""
        self._ended.set()
        self.join(GRACE_S)

    def run(self) -> None:
        """Look, again and again."""
        with contextlib.suppress(*STORE_ERRORS):  # where the store is gone nobody can be told
            self._watch()
            if is_served(self._agreement.default_store):
                self._store.append(LEFT, self._agreement.rank)
        atexit.unregister(self.end)  # it would keep the process groups that were watched

    def _watch(self) -> None:
        pause = QUICK_S
        while not self._ended.wait(pause):
            try:
                if default_store() is not self._agreement.default_store:
                    return
                has_news = self._look()
            except STORE_ERRORS as error:
                LOG.debug(
                    "megamoe: the process group's store has ended, so megamoe no longer watches "
                    "the ranks: %s",
                    error,
                )
                return
            slowest = SLOW_S / 2 if self._standstill.is_near() else SLOW_S
            pause = QUICK_S if has_news else min(1.5 * pause, slowest)

    def _look(self) -> bool:
        if stopped := self._store.peek("stop"):
            self._end_process(stopped)
        before = len(self._pending)
        for journal in list(self._agreement.journals.values()):
            self._pending += [(journal, e) for e in self._entries.of(f"{journal.key}/log")]
        has_news = len(self._pending) > before
        self._pending = [(j, e) for j, e in self._pending if not self._compare(j, e)]
        for journal in list(self._agreement.journals.values()):
            if conflict := self._standstill.look(journal):
                self._end_process(self._agreement.stop(conflict, self._store))
        return has_news or any(not one["is_backward"] for _, one in self._pending)

    def _compare(self, journal: CallLog, theirs: dict[str, Any]) -> bool:
        """Compare an entry; return whether it is dealt with: this rank has reached its end."""
        rank, start, end = self._agreement.rank, theirs["start"], reach(theirs)
        if theirs["rank"] != rank and (conflict := conflict_of_counts(journal, theirs, rank)):
            self._end_process(self._agreement.stop(conflict, self._store))
        has_passed = journal.end >= end  # before looking: what comes meanwhile is looked at next
        if theirs["rank"] == rank:
            return True
        waiting = journal.newest
        if waiting is not None and waiting.number > journal.num_calls:
            self._check(journal, theirs, waiting, is_launched=False)
        for call in journal.between(start, end):
            self._check(journal, theirs, call, is_launched=True)
            if call.start <= start and not theirs["is_backward"]:
                self._answer(journal, start, call.program)
        return has_passed

    def _check(
        self, journal: CallLog, theirs: dict[str, Any], call: ProgramCall, *, is_launched: bool
    ) -> None:
        mine = entry(self._agreement.rank, call, is_launched=is_launched)
        if conflict := conflict_of(journal, theirs, mine):
            self._end_process(self._agreement.stop(conflict, self._store))

    def _answer(self, journal: CallLog, start: int, program: CompiledProgram) -> None:
        """Publish the program the main thread ran at a position that another rank runs anew."""
        if start in journal.published or (journal.key, start) in self._answered:
            return
        self._answered.add((journal.key, start))
        mine = answer(self._agreement.rank, program, {journal.key: start}, is_launched=True)
        self._store.append(answers_key(journal.key, start), mine)

    def _end_process(self, message: str) -> None:
        """Print `message`, and end the process unless its main thread is about to."""
        agreement = self._agreement
        if not agreement.stopped:
            agreement.stopped = message
            self._store.append("heard", agreement.rank)
        if not agreement.has_raised:
            _say(f"megamoe: rank {agreement.rank}: RankDisagreement: {message}\n")
        self._ended.wait(GRACE_S)
        if not agreement.has_raised and not self._ended.is_set():
            agreement.wait_until_heard(self._store)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(EXIT_STATUS)
        self._ended.set()


def _say(text: str) -> None:
    os.write(2, text.encode())  # whole, also while the main thread holds the stream's lock


STILL_S: Final = 1.5
SAID: Final = 64
"""Number of its last collectives that a rank publishes."""


class Standstill:
    """Knowledge of one watcher about the groups on which nothing moves."""

    def __init__(self, rank: int, store: RankStore) -> None:
        """Speak for `rank` through `store`."""
        self._rank, self._store = rank, store
        self._seen: dict[str, tuple[int, float]] = {}
        self._compared: dict[str, tuple[int, int]] = {}

    def is_near(self) -> bool:
        """Whether some group has lately come to a standstill: others are soon heard of."""
        now = time.monotonic()
        return any(0.5 < now - since < 4 * STILL_S for count, since in self._seen.values() if count)

    def look(self, journal: CallLog) -> str:
        """Return the difference between ranks' launches on the group of `journal`; "" for none."""
        count, now = journal.count.at_most() or 0, time.monotonic()
        before, since = self._seen.get(journal.key, (0, now))
        if count != before or not count:
            self._seen[journal.key] = count, now
            return ""
        return self._compare(journal, count) if now - since > STILL_S else ""

    def _compare(self, journal: CallLog, count: int) -> str:
        key, first = f"{journal.key}/still", journal.ranks[0]
        theirs = None if self._rank == first else self._store.peek(key)
        known = count, theirs["count"] if theirs is not None else 0
        if self._compared.get(journal.key) == known:
            return ""
        self._compared[journal.key] = known
        mine = journal.count.recent() if theirs is not None or self._rank == first else {}
        if self._rank == first:
            last = dict(sorted(mine.items())[-SAID:])
            self._store.put(key, {"count": count, "last": last, "at": _place(journal)})
        return "" if theirs is None else self._conflict(journal, theirs, mine)

    def _conflict(self, journal: CallLog, theirs: dict[str, Any], mine: dict[int, str]) -> str:
        for number, said in sorted((int(n), said) for n, said in theirs["last"].items()):
            if mine.get(number, said) != said:
                first = journal.ranks[0]
                return (
                    f"ranks {first} and {self._rank} (of ranks {journal.ranks}) launched different "
                    f"collectives on process group {journal.group!r}. Collective {number}, counted "
                    f"over compiled and other code, is {said} on rank {first} and {mine[number]} "
                    f"on rank {self._rank}. Compiled code of rank {first} had launched "
                    f"{theirs['at']}, and that of rank {self._rank} had launched "
                    f"{_place(journal)}. {ONE_SIDED} {REMEDY}"
                )
        return ""


def _place(journal: CallLog) -> str:
    call = journal.last()
    if call is None:
        return "nothing yet"
    return f"collectives {call.start + 1} to {call.end}, at {call.program.places[0]}"
