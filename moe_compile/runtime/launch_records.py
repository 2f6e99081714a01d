"""Records of the collectives of each compiled graph, known to the process that runs it.

Contract
    A compiled graph carries its record; so it is known whether the graph was compiled here or came
    from a cache, and a later run of the same record costs one look into a set.
    The order of collectives that a graph was given after all passes is compared as well, of each
    group and across groups: a graph that another version of a pass left in a cache, that a pass
    failed on, or in which other values need gradients, ends all ranks with RankDisagreement. No
    rank waits here: `moe_compile.runtime.agreement` has the agreement before a run.

A compile site here is one place in the user's source, one direction and one plan: ranks of a
group on which nothing is rewritten may have other plans. The i-th different order a rank meets at
a site must be the i-th of every other rank: a rank that recompiles alone, for another number of
tokens, meets no new order, because orders speak neither of local sizes nor, unless ranks
promise to have as many tokens, of dependences that such sizes change (`graph/launch_order.py`).

Why the order across groups cannot hang
    Ranks of a group compare two things: the graph's launches on that group, in order, and their
    numbers among all launches of the graph, on whatever group. Where all groups agree, a launch has
    one number on all of its ranks, and each rank launches by rising numbers. Of the launches that
    are not done, the one of least number is the next of all its ranks. So it runs, also where a
    launch blocks all that come after it on its rank: communicators that are made at first use, one
    hardware queue. It takes no pair of ranks that shares two groups: rows and columns of a grid,
    one rank's the other way round, make a circle of ranks that wait for each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from moe_compile.runtime.agreement import Agreement, current_agreement
from moe_compile.runtime.answers import REMEDY

LIBRARY = torch.library.Library("megamoe", "FRAGMENT")
LIBRARY.define("record_launches(Tensor(a!) token, str record) -> ()")
RECORD_LAUNCHES = torch.ops.megamoe.record_launches.default

ROW_LENGTH: Final = re.compile(r"\[(?:\d+|\*)\]")
"""Last dimension in a record of a launch: local where it is that of the tokens."""

PLANNED_ALIKE: Final = (
    "although their plans are the same. Either a pass failed on some ranks only, or ranks differ "
    "in the values that need gradients or in the places where gradients are added."
)


class _Records:
    """Records of the graphs that this process has run."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self.listeners: list[Callable[[], None]] = []
        self.runs: list[Mapping[str, Any]] | None = None
        """Records of the graphs that run, in order, while they are noted."""
        self._met: dict[tuple[str, str, str], list[str]] = {}

    def run(self, record: str) -> None:
        self.add(record)
        if self.runs is not None:
            self.runs.append(self.records[record])

    def add(self, record: str) -> None:
        if record in self.records:
            return
        content = json.loads(record)
        agreement = current_agreement()
        if agreement is not None:
            site = f"{agreement.prefix} {content['plan']} {content['site']} {content['phase']}"
            for group, launches in sorted(content["launches"].items()):
                text = "\n".join(ROW_LENGTH.sub("", launch) for launch in launches)
                digest = hashlib.sha256(text.encode()).hexdigest()
                self._compare(agreement, "orders", site, group, digest)
            for group, numbers in sorted(content["numbers"].items()):
                told = ", ".join(map(str, numbers))
                self._compare(agreement, "numbers", site, group, told)
        self.records[record] = content
        for listener in self.listeners:
            listener()

    def _compare(self, agreement: Agreement, what: str, site: str, group: str, value: str) -> None:
        met = self._met.setdefault((what, site, group), [])
        if value in met:
            return
        met.append(value)
        first = agreement.first_of_group(group, f"{what}/{site}/{len(met)}", value)
        if first is None:
            return
        rank, theirs = first
        who, where = f"ranks {rank} and {agreement.rank}", f"the graph at {site.split(' ', 2)[2]}"
        agreement.end(
            _other_order(who, where)
            if what == "orders"
            else _other_numbers(who, where, group, theirs, value)
        )


def _other_order(who: str, where: str) -> str:
    """Return the message for a rank of the group with another order on it."""
    return f"{who} compiled different orders of collectives for {where}, {PLANNED_ALIKE} {REMEDY}"


def _other_numbers(who: str, where: str, group: str, theirs: str, mine: str) -> str:
    """Return the message for a rank with the same launches on the group, but others between."""
    numbers = zip(theirs.split(", "), mine.split(", "), strict=True)
    place, (their, our) = next(i for i in enumerate(numbers, 1) if i[1][0] != i[1][1])
    return (
        f"{who} compiled different orders of the collectives of several process groups for "
        f"{where}, {PLANNED_ALIKE} Launch {place} on group {group!r} is number {their} of all "
        f"launches on the first rank, and number {our} on the second. The order within each group "
        "is right. But if a launch holds up later launches (when a communicator is made at its "
        "first use, or with CUDA_DEVICE_MAX_CONNECTIONS=1), ranks may wait for each other without "
        "end. Compare the ranks' programs, options, sources and torch versions "
        "(TORCH_LOGS=+moe_compile)."
    )


_RECORDS = _Records()


def executed_records() -> list[Mapping[str, Any]]:
    """Return the records of all compiled graphs this process has run, in order of first run."""
    return list(_RECORDS.records.values())


def on_first_execution(listener: Callable[[], None]) -> None:
    """Call `listener` when a compiled graph with a record runs for the first time."""
    _RECORDS.listeners.append(listener)


@contextlib.contextmanager
def runs_noted() -> Iterator[list[Mapping[str, Any]]]:
    """Note the record of each compiled graph with collectives that runs meanwhile, in order."""
    before, _RECORDS.runs = _RECORDS.runs, []
    try:
        yield _RECORDS.runs
    finally:
        _RECORDS.runs = before


def _record_launches(token: torch.Tensor, record: str) -> None:
    del token  # written in name only: the declaration keeps compilers from dropping the call
    _RECORDS.run(record)


LIBRARY.impl("record_launches", _record_launches, "CompositeExplicitAutograd")
LIBRARY.impl("record_launches", lambda *_: None, "Meta")
