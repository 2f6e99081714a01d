"""Ranks that work through the items of a section together; rank 0 keeps the record.

Contract
    Every rank calls `run` with the same items in the same order; rank 0 says which are run. An
    item on which ranks fail differently leaves them at different places: `OutOfStep` is raised,
    and a new process of each rank goes on behind that item. An item that was begun and not
    finished, by a process that was ended, is a failure.
    Ranks talk through the store: they can report a group that hangs.
    An item runs in default groups of as many ranks as it asks for, several side by side; ranks that
    are left over do nothing. A team that makes no groups leaves them to its items.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from moe_compile.check.sections import Record, say
from moe_compile.testing.process_groups import join, rank_device
from moe_compile.testing.rank_pool import forget_compiled

Found = TypeVar("Found")

TAIL: Final = 4000
"""Characters kept of a traceback."""
LATER_S: Final = 60.0
"""Seconds that ranks are waited for beyond a collective: one may only be slow."""
RESTART: Final = 75
"""Exit status of a process whose section goes on in a new one."""


def slowest(seconds: list[float]) -> list[float]:
    """Return the greatest of all ranks, each of `seconds` by itself."""
    worst = torch.tensor(seconds, dtype=torch.float64, device=rank_device())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


class OutOfStep(Exception):
    """Ranks may be at different places: only new processes can go on."""


class Team:
    """This rank among all; `record` is rank 0's, None on others."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        num_ranks: int,
        *,
        device: str = "cpu",
        local_rank: int = 0,
        collective_timeout_s: float = 120.0,
        record: Record | None = None,
        makes_groups: bool = True,
    ) -> None:
        """Prepare; the first item makes the group."""
        self._makes_groups = makes_groups
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        self.record = record
        self._store, self._local_rank = store, local_rank
        self._collective_s = collective_timeout_s
        self._patience = timedelta(seconds=collective_timeout_s + LATER_S)
        self._num_items = self._num_groups = 0
        self._group_size = 0

    @property
    def is_first(self) -> bool:
        """Whether this rank keeps the record."""
        return self.rank == 0

    def run(
        self,
        what: str,
        work: Callable[[], Found],
        judge: Callable[[Record, list[Found]], None],
        *,
        num_ranks: int = 0,
        needs_s: float = 0.0,
    ) -> None:
        """Do `work` on groups of `num_ranks`, all by default, and `judge` all ranks' findings.

        An item for more ranks than there are is skipped.
        """
        size = num_ranks or self.num_ranks
        item = self._next_item()
        if not self._is_run(item, what, size, needs_s):
            return
        works = self.rank < self.num_ranks // size * size
        answer = self._answer(work, size) if works else ("idle", None)
        self._store.set(f"{item}/{self.rank}", pickle.dumps(answer))
        if self.record is not None:
            self._judge(item, what, judge, self.record)
        if self._told(item, "verdict") == b"restart":
            raise OutOfStep(what)

    def tell(self, what: str, value: str | None = None) -> str:
        """Return what one rank, which names a `value`, tells all ranks as `what`."""
        if value is not None:
            self._store.set(f"told/{what}", value)
        self._store.wait([f"told/{what}"], self._patience)
        return str(self._store.get(f"told/{what}").decode())

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._group_size = 0

    def _next_item(self) -> str:
        self._num_items += 1
        return f"item/{self._num_items}"

    def _told(self, item: str, what: str) -> bytes:
        self._store.wait([f"{item}/{what}"], self._patience)
        return bytes(self._store.get(f"{item}/{what}"))

    def _is_run(self, item: str, what: str, size: int, needs_s: float) -> bool:
        """Return whether the item is run, as rank 0 says."""
        if self.record is not None:
            why = f"it needs {size} ranks, and {self.num_ranks} were started" * (
                size > self.num_ranks
            )
            is_run = self.record.begin(what, why=why, needs_s=needs_s)
            self._store.set(f"{item}/order", "run" if is_run else "skip")
        return self._told(item, "order") == b"run"

    def _answer(self, work: Callable[[], Any], size: int) -> tuple[str, Any]:
        try:
            if self._makes_groups:
                self._join(size)
            return "found", work()
        except Exception as error:  # noqa: BLE001  (a machine breaks in ways no list covers)
            return "error", (f"{type(error).__name__}: {error}"[:500], traceback.format_exc())

    def _join(self, size: int) -> None:
        """Be in a default group of `size` ranks."""
        if self._group_size == size and dist.is_initialized():
            return
        self.leave()
        forget_compiled()
        self._num_groups += 1
        number, rank = divmod(self.rank, size)
        prefix = f"group/{self._num_groups}/{size}/{number}"
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        join(
            dist.PrefixStore(prefix, self._store),
            rank,
            size,
            device=self.device,
            local_rank=self._local_rank,
            timeout_s=self._collective_s,
        )
        self._group_size = size

    def _judge(
        self,
        item: str,
        what: str,
        judge: Callable[[Record, list[Any]], None],
        record: Record,
    ) -> None:
        answers = [self._answer_of(item, rank) for rank in range(self.num_ranks)]
        errors = {r: told for r, (kind, told) in enumerate(answers) if kind == "error"}
        for rank, (why, trace) in list(errors.items())[:1]:
            others = f" (ranks {sorted(errors)})" if len(errors) > 1 else f" (rank {rank})"
            record.fail(what, why + others, trace[-TAIL:])
        if not errors:
            found = [told for kind, told in answers if kind == "found"]
            record.attempt(what, lambda: judge(record, found))
        record.end(what)
        working = sum(kind != "idle" for kind, _ in answers)
        is_alike = len({why for why, _ in errors.values()}) <= 1 and len(errors) in (0, working)
        self._store.set(f"{item}/verdict", "go on" if is_alike else "restart")

    def _answer_of(self, item: str, rank: int) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = pickle.loads(self._told(item, str(rank)))
        except dist.DistStoreError:
            say(f"rank {rank} does not answer")
            return "error", (f"rank {rank} did not answer", "")
        return answer
