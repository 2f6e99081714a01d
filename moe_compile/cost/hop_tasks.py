"""The tasks of one exchange of rows in two hops, for the planner and for `megamoe simulate`.

Contract
    Hops as the compiler makes them: hop 1 between nodes and hop 2 inside the node are collectives
    of their own; rows are moved by compute before, between and behind them.
    Hop 1 goes in slices of tokens, hop 2 of a slice in chunks of experts once the slice is there.
    Where rows are summed, each hop needs the rows it sends of all chunks.
    Without torch.

Pseudo-code
    copies   rows of all slices; of each slice hop 1, rows, and hop 2 of each chunk;
             rows of each chunk in their order
    sums     rows of each chunk; hop 2 of each slice and chunk;
             of each slice sums on the node and hop 1; sums at home
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_compile.cost.hop_shape import INDEX_KERNELS, PLACE_KERNELS, HopShape
from moe_compile.cost.tasks import COMPUTE, LINK, NODE_LINK, TaskList


class HopTimes(Protocol):
    """Microseconds on one machine: the planner's `Rates`, or the simulator's `Kernels`."""

    def memory_us(self, nbytes: float, kernels: float = 1.0) -> float:
        """Return the time to move so many bytes in so many kernels."""
        ...

    def hop_us(self, nbytes: float, *, within: bool) -> float:
        """Return the time of a hop of so many bytes, `within` the node or between nodes."""
        ...

    def scores_us(self, nbytes: float) -> float:
        """Return the time of sending scores of so many bytes, which go flat."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HopTasks:
    """Adds the tasks of one exchange to a list."""

    made: TaskList
    times: HopTimes
    hops: HopShape
    label: str = ""
    """Prefix of every name."""
    rows: float
    """Bytes of a rank's rows, one for each expert of a token."""
    num_rows: float
    moved: tuple[float, float, float]
    """Bytes read and written before, between and behind the hops."""
    wire_share: float = 1.0
    """Bytes of a row as sent over those in the model's number format. Below 1 rows are packed, by
    kernels of their own where they are summed."""
    num_chunks: int = 1
    num_slices: int = 1
    launch_us: float | None = None
    """Compute time of a launch, before each collective; None for no such task."""
    node_link: str = NODE_LINK
    cuts_moves: bool = False
    """Whether rows are moved by kernels of each slice and chunk even where one kernel could move
    all of them, and masks go at once."""

    def told(self, needs: Sequence[int], *, finds_places: bool) -> list[int]:
        """Add the tasks that find the rows of both hops, and the messages sent beside them."""
        number = INDEX_KERNELS + (PLACE_KERNELS if finds_places else 0.0)
        last = self._add("indices", self.times.memory_us(0.0, number), needs)
        slices = 1 if self.cuts_moves else self.num_slices
        masks_us = self.times.hop_us(self.hops.mask_bytes(self.num_rows) / slices, within=False)
        for _ in range(slices):
            last = self._add("masks", masks_us, [last], LINK)
        return [self.scores([last])]

    def scores(self, needs: Sequence[int]) -> int:
        """Add the exchange of scores, or of their gradients: one number a row, flat."""
        us = self.times.scores_us(self.hops.score_bytes(self.num_rows))
        return self._send("scores", us, needs, LINK)

    def copies(self, needs: Sequence[int]) -> list[int]:
        """Add an exchange of rows that are copied; return the last task of each chunk."""
        before, between, behind = self.moved
        came: list[list[int]] = [[] for _ in range(self.num_chunks)]
        whole = [] if self.cuts_moves else [self._move("rows 1", before, needs)]
        for number in range(self.num_slices):
            mark = self._mark(number)
            rows = whole or [self._move(f"rows 1{mark}", before / self.num_slices, needs)]
            there = self._hop_1(mark, rows)
            if not self.cuts_moves:
                there = self._move(f"rows 2{mark}", between / self.num_slices, [there])
            for chunk, of_chunk in enumerate(came):
                own, start = self._mark(number, chunk), there
                if self.cuts_moves:
                    start = self._move(f"rows 2{own}", between / self._num_parts, [there])
                of_chunk.append(self._hop_2(own, [start]))
        return [
            self._move(f"rows 3{self._mark(None, chunk)}", behind / self.num_chunks, of_chunk)
            for chunk, of_chunk in enumerate(came)
        ]

    def sums(self, needs: Sequence[Sequence[int]]) -> int:
        """Add an exchange of rows that are summed, by each chunk's needs; return the last task."""
        before, between, behind = self.moved
        came: list[list[int]] = [[] for _ in range(self.num_slices)]
        for chunk, of_chunk in enumerate(needs):
            name = f"rows 3{self._mark(None, chunk)}"
            whole = (
                [] if self.cuts_moves else [self._move(name, before / self.num_chunks, of_chunk)]
            )
            for number, of_slice in enumerate(came):
                own = self._mark(number, chunk)
                rows = whole or [self._move(f"rows 3{own}", before / self._num_parts, of_chunk)]
                of_slice.append(self._hop_2(own, rows))
        home = []
        for number, of_slice in enumerate(came):
            mark = self._mark(number)
            part = between / self.num_slices  # a sum reads rows of all chunks as they came
            rows = [self._move(f"sums on nodes{mark}", part, of_slice, self.num_chunks + 1)]
            home.append(self._hop_1(mark, rows))
        return self._move("sums at home", behind, home, self.num_slices)

    @property
    def _num_parts(self) -> int:
        return self.num_slices * self.num_chunks

    def _hop_1(self, mark: str, needs: Sequence[int]) -> int:
        sent = self.wire_share * self.hops.across_bytes(self.rows) / self.num_slices
        return self._send(f"hop 1{mark}", self.times.hop_us(sent, within=False), needs, LINK)

    def _hop_2(self, mark: str, needs: Sequence[int]) -> int:
        sent = self.wire_share * self.hops.inside_bytes(self.rows) / self._num_parts
        us = self.times.hop_us(sent, within=True)
        return self._send(f"hop 2{mark}", us, needs, self.node_link)

    def _send(self, name: str, us: float, needs: Sequence[int], link: str) -> int:
        if self.launch_us is not None:
            needs = [self._add("launch", self.launch_us, needs)]
        return self._add(name, us, needs, link)

    def _move(self, name: str, nbytes: float, needs: Sequence[int], num_packing: int = 0) -> int:
        """Add a move of rows, with one more kernel for each time they are packed or unpacked."""
        kernels = float(nbytes > 0.0) + num_packing * (self.wire_share < 1.0)
        return self._add(name, self.times.memory_us(nbytes, kernels), needs)

    def _add(self, name: str, us: float, needs: Sequence[int], stream: str = COMPUTE) -> int:
        return self.made.add(self.label + name, us, needs, stream)

    def _mark(self, number: int | None, chunk: int | None = None) -> str:
        """Return the part of a name that tells slices and chunks apart; "" where there is one."""
        numbers = ((number, self.num_slices), (chunk, self.num_chunks))
        return "".join(f" {n}" for n, count in numbers if n is not None and count > 1)
