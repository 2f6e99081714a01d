"""Ranks agree on the order of collectives before a compiled graph runs for the first time.

Contract
    A compiled graph carries its record; so the check happens whether the graph was compiled here
    or came from a cache, and a later run of the same record costs one look into a set.
    Ranks that disagree raise RankDisagreement, naming themselves; no collective was launched.

A family is one place in the user's source and one direction. The i-th different digest a rank
meets in a family must be the i-th of every other rank: a rank that recompiles alone, for another
number of tokens, meets no new digest, because digests do not speak of local sizes.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from moe_compile.errors import RankDisagreement

LIBRARY = torch.library.Library("megamoe", "FRAGMENT")
LIBRARY.define("agree_on_order(Tensor(a!) token, str record) -> ()")
AGREE_ON_ORDER = torch.ops.megamoe.agree_on_order.default

TIMEOUT: Final = datetime.timedelta(minutes=30)
"""How long a rank waits for others to reach the same graph: they may still be compiling."""


class _Agreement:
    """What this process has run and agreed on."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self.listeners: list[Callable[[], None]] = []
        self._digests: dict[str, list[str]] = {}

    def check(self, record: str) -> None:
        if record in self.records:
            return
        content = json.loads(record)
        for group, digest in sorted(content["digests"].items()):
            self._compare(f"{content['family']} {content['phase']}", group, digest)
        self.records[record] = content
        for listener in self.listeners:
            listener()

    def _compare(self, family: str, group: str, digest: str) -> None:
        ranks = _ranks_to_ask(group)
        prefix = f"megamoe/{family}/{','.join(map(str, ranks))}"
        met = self._digests.setdefault(prefix, [])
        if digest in met or len(ranks) < 2:
            return
        ordinal = len(met)
        met.append(digest)
        answers = _publish_and_read(f"{prefix}/{ordinal}", ranks, digest)
        if differing := sorted(r for r, theirs in answers.items() if theirs != digest):
            raise RankDisagreement(_message(family, differing, answers))


_AGREEMENT = _Agreement()


def executed_records() -> list[Mapping[str, Any]]:
    """Return the records of all compiled graphs this process has run, in order of first run."""
    return list(_AGREEMENT.records.values())


def on_first_execution(listener: Callable[[], None]) -> None:
    """Call `listener` after each compiled graph's first run was agreed on."""
    _AGREEMENT.listeners.append(listener)


def _ranks_to_ask(group: str) -> list[int]:
    """Return the global ranks of `group`; [] where there is nobody to ask."""
    if not dist.is_initialized():
        return []
    process_group = dist.distributed_c10d._resolve_process_group(group)
    if dist.get_backend(process_group) == "fake":
        return []
    return sorted(dist.get_process_group_ranks(process_group))


def _publish_and_read(key: str, ranks: list[int], digest: str) -> dict[int, str]:
    """Publish this rank's digest; return those of the first rank, or on it those of all."""
    store = dist.distributed_c10d._get_default_store()
    me = dist.get_rank()
    store.set(f"{key}/{me}", digest)
    asked = [r for r in ranks if r != me] if me == ranks[0] else [ranks[0]]
    answers = {}
    for rank in asked:
        try:
            store.wait([f"{key}/{rank}"], TIMEOUT)
        except (RuntimeError, dist.DistStoreError) as error:
            raise RankDisagreement(
                f"rank {rank} did not reach the graph that rank {me} is about to run ({key}) "
                f"within {TIMEOUT}: it compiled something else, or stopped"
            ) from error
        answers[rank] = store.get(f"{key}/{rank}").decode()
    return answers


def _message(family: str, differing: list[int], answers: Mapping[int, str]) -> str:
    me = dist.get_rank()
    return (
        f"ranks {differing} compiled another order of collectives than rank {me} for the graph "
        f"at {family} ({', '.join(f'rank {r}: {answers[r][:12]}' for r in differing)}). Running "
        "it would corrupt data silently. Compare their logs (TORCH_LOGS=+moe_compile): a pass "
        "failed on some ranks only, their options, sources or torch versions differ, or with "
        "megamoe.equal_tokens they have different numbers of tokens."
    )


def _agree_on_order(token: torch.Tensor, record: str) -> None:
    del token  # written in name only: the declaration keeps compilers from dropping the call
    _AGREEMENT.check(record)


LIBRARY.impl("agree_on_order", _agree_on_order, "CompositeExplicitAutograd")
LIBRARY.impl("agree_on_order", lambda *_: None, "Meta")
