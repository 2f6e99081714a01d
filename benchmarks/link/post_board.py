"""Where ranks write when they posted each exchange, in memory that all of them see.

Contract
    Every rank reads what each other rank wrote for the same exchange, or gets an error: a rank
    that never posts raises TimeoutError, a record already overwritten raises RuntimeError.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SLOTS: Final = 1024
"""Exchanges a rank may be ahead of another; a step makes under a hundred and ends in a barrier."""
FIELDS: Final = 5
"""Ordinal of the exchange; time of the post in seconds, bytes on the wire, bytes inside the node,
kind of group."""
DOUBLE: Final = 8
POLL_S: Final = 50e-6
TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Post:
    """One rank's part of one exchange."""

    time_s: float
    wire_bytes: float
    """Of two links, on the one between nodes."""
    inside_bytes: float = 0.0
    """On the link inside a node."""
    span: int = 0
    """Kind of group, as benchmarks/link/link_model.py has them."""


def create_board(path: Path, num_ranks: int) -> None:
    """Make an empty board at `path`, once, before any rank opens it."""
    path.write_bytes(bytes(num_ranks * SLOTS * FIELDS * DOUBLE))


class PostBoard:
    """One rank's view of the board; ordinals start at 1 and rise by 1."""

    def __init__(self, path: Path, rank: int, num_ranks: int) -> None:
        """Open what `create_board` made."""
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._cells = memoryview(self._memory).cast("d")
        self.rank, self.num_ranks = rank, num_ranks

    def write(self, ordinal: int, post: Post) -> None:
        """Publish this rank's post; the ordinal last, so that a reader never sees half of it."""
        at = self._cell(self.rank, ordinal)
        self._cells[at + 1] = post.time_s
        self._cells[at + 2] = post.wire_bytes
        self._cells[at + 3] = post.inside_bytes
        self._cells[at + 4] = post.span
        self._cells[at] = ordinal

    def read(self, ordinal: int) -> list[Post]:
        """Return every rank's post of this exchange; waits for those still to come."""
        return [self._read(rank, ordinal) for rank in range(self.num_ranks)]

    def _read(self, rank: int, ordinal: int) -> Post:
        at = self._cell(rank, ordinal)
        if self._cells[at] < ordinal:
            self._wait(at, rank, ordinal)
        time_s, wire_bytes, inside_bytes, span = self._cells[at + 1 : at + FIELDS]
        post = Post(time_s, wire_bytes, inside_bytes, int(span))
        if self._cells[at] != ordinal:
            raise RuntimeError(f"exchange {ordinal} of rank {rank} was overwritten")
        return post

    def _wait(self, at: int, rank: int, ordinal: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self._cells[at] < ordinal:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} did not post exchange {ordinal}")
            time.sleep(POLL_S)

    def _cell(self, rank: int, ordinal: int) -> int:
        return (rank * SLOTS + ordinal % SLOTS) * FIELDS
