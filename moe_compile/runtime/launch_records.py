"""What each compiled graph launches, known to the process that runs it.

Contract
    A compiled graph carries its record; so it is known whether the graph was compiled here or came
    from a cache, and a later run of the same record costs one look into a set.
    The order of collectives that a graph was given after all passes is compared as well: a graph
    that another version of a pass left in a cache, that a pass failed on, or in which other values
    need gradients, ends all ranks with RankDisagreement. Nobody is waited for: what ranks must
    agree on before they run is said in `moe_compile.runtime.agreement`.

A compile site here is one place in the user's source, one direction and one plan: ranks of a
group on which nothing is rewritten may have other plans. The i-th different order a rank meets at
a site must be the i-th of every other rank: a rank that recompiles alone, for another number of
tokens, meets no new order, because orders speak neither of local sizes nor, unless ranks
promise to have as many tokens, of dependences that such sizes change (`graph/launch_order.py`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from moe_compile.runtime.agreement import Agreement, current_agreement
from moe_compile.runtime.answers import REMEDY

LIBRARY = torch.library.Library("megamoe", "FRAGMENT")
LIBRARY.define("record_launches(Tensor(a!) token, str record) -> ()")
RECORD_LAUNCHES = torch.ops.megamoe.record_launches.default

ROW_LENGTH: Final = re.compile(r"\[(?:\d+|\*)\]")
"""In what a record says of a launch: local where the last dimension is that of the tokens."""


class _Records:
    """What this process has run."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self.listeners: list[Callable[[], None]] = []
        self._met: dict[tuple[str, str], list[str]] = {}

    def add(self, record: str) -> None:
        if record in self.records:
            return
        content = json.loads(record)
        agreement = current_agreement()
        if agreement is not None:
            site = f"{agreement.prefix} {content['plan']} {content['site']} {content['phase']}"
            for group, launches in sorted(content["launches"].items()):
                self._compare(agreement, site, group, launches)
        self.records[record] = content
        for listener in self.listeners:
            listener()

    def _compare(self, agreement: Agreement, site: str, group: str, launches: list[str]) -> None:
        met = self._met.setdefault((site, group), [])
        text = "\n".join(ROW_LENGTH.sub("", launch) for launch in launches)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest in met:
            return
        met.append(digest)
        key = f"orders/{site}/{len(met)}"
        if conflict := _conflict(site, agreement.first_of_group(group, key, digest)):
            agreement.end(conflict)


def _conflict(site: str, first: tuple[int, int] | None) -> str:
    """Return what to say when another rank of the group has another order; "" else."""
    if first is None:
        return ""
    return (
        f"ranks {first[0]} and {first[1]} compiled different orders of collectives for the graph "
        f"at {site.split(' ', 2)[2]}, though what they planned is alike: a pass failed on some "
        f"ranks only, or other values need gradients, or gradients go elsewhere there. {REMEDY}"
    )


_RECORDS = _Records()


def executed_records() -> list[Mapping[str, Any]]:
    """Return the records of all compiled graphs this process has run, in order of first run."""
    return list(_RECORDS.records.values())


def on_first_execution(listener: Callable[[], None]) -> None:
    """Call `listener` when a compiled graph with a record runs for the first time."""
    _RECORDS.listeners.append(listener)


def _record_launches(token: torch.Tensor, record: str) -> None:
    del token  # written in name only: the declaration keeps compilers from dropping the call
    _RECORDS.add(record)


LIBRARY.impl("record_launches", _record_launches, "CompositeExplicitAutograd")
LIBRARY.impl("record_launches", lambda *_: None, "Meta")
