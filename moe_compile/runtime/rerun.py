"""Which program of each compiled graph runs: the one without host reads, or the one with them.

Contract
    A trainer that can run a step again says so before anything is compiled, and switches; all ranks
    switch alike. Without one no program without reads is compiled.
    Rows without room are noted on the device. `agreed` reads the note once: it is 1 on all ranks
    where it is 1 on any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import torch
import torch.distributed as dist


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
        self._note: torch.Tensor | None = None

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
        """Note one int32 of the device: 1 where rows had no room. None is 0."""
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
            note = torch.zeros((), dtype=torch.int32, device=device)
        if dist.is_initialized():
            note = note.clone()
            dist.all_reduce(note, dist.ReduceOp.MAX)
        return bool(note.item())


RERUN: Final = Rerun()
