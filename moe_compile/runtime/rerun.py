"""Which program of each compiled graph runs: the one without host reads, or the one with them.

Contract
    A trainer that can run a step again says so before anything is compiled, and switches; all ranks
    switch alike. Without one no program without reads is compiled.
    Rows without room are noted on the device, and the room that all rows would have needed.
    `agreed` reads the note once: each number is the largest of all ranks.
    The room that `row_room = "auto"` stands for is the switch's too: programs are compiled for it.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from moe_compile.config import ROOM_AT_FIRST, ROOMS

NEED_UNIT: Final = 1000
"""A note has the room that rows needed in parts of an even share: in thousandths, rounded up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoomTimes:
    """Predicted microseconds of the layers of one program, forward and backward, by their room."""

    us: tuple[float, ...]
    """Of each of `ROOMS`."""
    reads_us: float
    """Of the program with reads."""


class Rerun:
    """The switch of this process, and its note of rows without room."""

    def __init__(self) -> None:
        """Begin with reads, and no trainer."""
        self.begin(is_served=False)

    def begin(self, *, is_served: bool) -> None:
        """Begin a job."""
        self.is_served = is_served
        """Whether a trainer runs steps again."""
        self.without_reads = False
        """Whether programs without reads run where there are some."""
        self.num_steps = 0
        self.num_again = 0
        """Steps so far, and those of them that ran again."""
        self.room = ROOM_AT_FIRST
        """The factor that `row_room = "auto"` stands for."""
        self.needed = 0.0
        """The least factor with which all rows of the step last agreed on had room."""
        self._note: torch.Tensor | None = None
        self._runs = Counter[RoomTimes | None]()

    @contextlib.contextmanager
    def reading_nothing(self) -> Iterator[None]:
        """Run programs without reads."""
        with self._switched(without_reads=True):
            yield

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Run programs with reads."""
        with self._switched(without_reads=False):
            yield

    @contextlib.contextmanager
    def _switched(self, *, without_reads: bool) -> Iterator[None]:
        before, self.without_reads = self.without_reads, without_reads
        try:
            yield
        finally:
            self.without_reads = before

    def add(self, overflow: torch.Tensor | None) -> None:
        """Note two int32 of the device: 1 where rows had no room, and the room that they needed.

        None is 0 for both.
        """
        if overflow is None:
            return
        self._note = overflow if self._note is None else torch.maximum(self._note, overflow)

    def taken(self) -> torch.Tensor | None:
        """Return this rank's note since the last call, None where no program was noted."""
        note, self._note = self._note, None
        return note

    def agreed(self, device: torch.device) -> bool:
        """Return whether rows had no room on any rank since the last call. All ranks call it."""
        if (note := self.taken()) is None:
            note = torch.zeros(2, dtype=torch.int32, device=device)
        if dist.is_initialized():
            note = note.clone()
            dist.all_reduce(note, dist.ReduceOp.MAX)
        had_none, needed = note.tolist()
        self.needed = needed / NEED_UNIT
        return bool(had_none)

    def ran(self, times: RoomTimes | None) -> None:
        """Count a run of a program without reads; None where its layers have no predicted times."""
        self._runs[times] += 1

    def agreed_times(self, device: torch.device) -> RoomTimes | None:
        """Return the predicted times of all runs since the last call, of the slowest rank of each.

        None where a program of some rank has none, or none ran. All ranks call it.
        """
        runs, self._runs = self._runs, Counter[RoomTimes | None]()
        sums = torch.zeros(1 + len(ROOMS), dtype=torch.float64)
        for times, number in runs.items():
            each = [math.inf] * len(sums) if times is None else [times.reads_us, *times.us]
            sums += number * torch.tensor(each, dtype=torch.float64)
        if dist.is_initialized():
            sums = sums.to(device)
            dist.all_reduce(sums, dist.ReduceOp.MAX)
        reads_us, *us = sums.tolist()
        is_known = 0.0 < reads_us < math.inf
        return RoomTimes(us=tuple(us), reads_us=reads_us) if is_known else None


RERUN: Final = Rerun()
