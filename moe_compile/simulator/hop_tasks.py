"""The tasks of an exchange of rows, in one collective or in two hops.

Contract
    Hops as the compiler makes them: hop 1 between nodes and hop 2 inside the node are collectives
    of their own, each on the stream of its link; row operators stand before, between and behind.
    Bytes are those of `cost/hop_shape.py`, which the planner's prices have too.
    In chunks of experts hop 1 is whole, hop 2 in chunks; in slices of tokens both are cut, and what
    is behind them waits for all slices.

Pseudo-code
    copies   begin: hop 1 (slices: and hop 2 of each, then rows in their order)
             chunk: hop 2, rows in their order
    sums     chunk: rows in the order of ranks, hop 2 back
             end:   sums on the node, hop 1, sums at home (slices: all of it, slice by slice)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_compile.cost.hop_shape import INDEX_KERNELS, PLACE_KERNELS, HopShape
from moe_compile.cost.tasks import LINK, NODE_LINK
from moe_compile.simulator.layer_costs import LayerCosts

AddTask = Callable[[str, float, list[int], str], int]
"""Adds a task: its name, its time, what it needs, its stream, "" for compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HopTasks:
    """One exchange of rows in two hops."""

    costs: LayerCosts
    hops: HopShape
    add: AddTask
    name: str
    element_bytes: float
    num_chunks: int = 1
    """Of hop 2, by experts."""
    num_slices: int = 1
    """Of both hops, by tokens."""

    def find_rows(self, needs: list[int]) -> list[int]:
        """Add finding the rows of both hops, and what travels beside them."""
        number = INDEX_KERNELS + (PLACE_KERNELS if self.costs.sums_in_hops else 0.0)
        indices = self._add("indices", self.costs.kernels.memory_us(0.0, number), needs)
        masks = self.costs.kernels.hop_us(self.hops.mask_bytes(self._num_rows), within=False)
        sent = self._add("masks", masks, [indices], LINK)
        return [sent, self.add_scores([sent])]

    def begin_copies(self, needs: list[int]) -> int:
        """Add what comes before chunks of hop 2; return the last task."""
        before, between, after = self.hops.copied_bytes(self._rows)
        arrived = []
        for number in range(self.num_slices):
            mark, part = self._mark(number, self.num_slices), 1.0 / self.num_slices
            rows = self._move(f"rows 1{mark}", before * part, needs)
            there = self._hop_1(mark, part, [rows])
            if self.num_slices > 1:
                rows = self._move(f"rows 2{mark}", between * part, [there])
                there = self._hop_2(mark, part, [rows])
            arrived.append(there)
        if self.num_slices > 1:
            return self._move("rows 3", after, arrived)
        return arrived[0]

    def copy_chunk(self, number: int, begun: int) -> int:
        """Add hop 2 of a chunk, the rows in the order of its experts behind it."""
        if self.num_slices > 1:
            return begun
        _, between, after = self.hops.copied_bytes(self._rows)
        mark, part = self._mark(number, self.num_chunks), 1.0 / self.num_chunks
        rows = self._move(f"rows 2{mark}", between * part, [begun])
        return self._move(f"rows 3{mark}", after * part, [self._hop_2(mark, part, [rows])])

    def sum_chunk(self, number: int, needs: list[int]) -> int:
        """Add hop 2 back of a chunk."""
        if self.num_slices > 1:
            return needs[0]
        before, _, _ = self.hops.summed_bytes(self._rows)
        mark, part = self._mark(number, self.num_chunks), 1.0 / self.num_chunks
        rows = self._move(f"rows 3{mark}", before * part, needs)
        return self._hop_2(mark, part, [rows])

    def end_sums(self, needs: Sequence[int]) -> int:
        """Add what comes behind chunks of hop 2 back; return the last task."""
        before, between, after = self.hops.summed_bytes(self._rows)
        home = []
        for number in range(self.num_slices):
            mark, part, there = self._mark(number, self.num_slices), 1.0 / self.num_slices, [*needs]
            if self.num_slices > 1:
                rows = self._move(f"rows 3{mark}", before * part, there)
                there = [self._hop_2(mark, part, [rows])]
            sums = self._move(f"sums on nodes{mark}", between * part, there)
            home.append(self._hop_1(mark, part, [sums]))
        return self._move("sums at home", after, home)

    def add_scores(self, needs: list[int]) -> int:
        """Add what scores, or their gradients, take: one number a row, flat."""
        nbytes = self.hops.score_bytes(self._num_rows)
        return self._add("scores", self.costs.kernels.hop_us(nbytes, within=False), needs, LINK)

    @property
    def _num_rows(self) -> float:
        return self.costs.local_tokens * self.costs.model.top_k

    @property
    def _rows(self) -> float:
        """Return the bytes of a rank's rows, one for each expert of a token."""
        return self.costs.routed_bytes(self.element_bytes)

    def _hop_1(self, mark: str, part: float, needs: list[int]) -> int:
        sent = self.hops.across_bytes(self._rows) * part
        return self._add(f"hop 1{mark}", self.costs.kernels.hop_us(sent, within=False), needs, LINK)

    def _hop_2(self, mark: str, part: float, needs: list[int]) -> int:
        sent = self.hops.inside_bytes(self._rows) * part
        us = self.costs.kernels.hop_us(sent, within=True)
        return self._add(f"hop 2{mark}", us, needs, NODE_LINK)

    def _move(self, name: str, nbytes: float, needs: list[int]) -> int:
        return self._add(name, self.costs.kernels.memory_us(nbytes), needs)

    def _add(self, name: str, us: float, needs: list[int], stream: str = "") -> int:
        return self.add(f"{self.name}: {name}", us, needs, stream)

    def _mark(self, number: int, count: int) -> str:
        return f" {number}" if count > 1 else ""
