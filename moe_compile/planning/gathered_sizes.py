"""How much moves where a region's tokens are gathered: rows, bytes on the link, bytes in memory.

Contract
    Exact for what leaves a rank; memory as the emitted operators read and write, routing balanced.

With n ranks, T tokens of a rank of width D, R rows of a rank, E experts and room for P rows where
balanced routing brings R

    all-gather, backward reduce-scatter     tokens          (n - 1) T D
    all-gather                              numbers         (n - 1) (E + R), 4 bytes each
    all-gather, backward reduce-scatter     each factor     (n - 1) R
    reduce-scatter, backward all-gather     sums            (n - 1) T D

leave a rank; P rows are picked from n T tokens, pass the experts, and are added to n T sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from moe_compile.analysis.regions import MoERegion
from moe_compile.analysis.token_regions import TokenRows
from moe_compile.graph.query import known_rows, tensor_of

NUMBER_BYTES: Final = 4
"""Of a count or a token's number on the wire: int32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredWay:
    """How a region's tokens could be gathered."""

    region: MoERegion
    found: TokenRows
    room: float = 1.0
    """Rows there is room for, over those that balanced routing brings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredSizes:
    """See the module docstring; `*_bytes` of an element but where it is said."""

    num_ranks: int
    num_experts: int
    tokens: int
    rows: int
    width: int
    room: float
    token_bytes: int
    row_bytes: int
    """Of a row as it is added up."""
    sum_bytes: int

    @classmethod
    def of(cls, way: GatheredWay) -> Self | None:
        """Return the sizes, or None where tokens or rows are no number in the graph."""
        region, found = way.region, way.found
        added = found.sums.weights or (found.after[-1] if found.after else region.result)
        tensors = [tensor_of(n) for n in (found.tokens, added, found.sums.total)]
        tokens, rows = known_rows(found.tokens), known_rows(found.index)
        token, row, total = (t.element_size() if t is not None else 0 for t in tensors)
        width = tensors[0].shape[1] if tensors[0] is not None else 0
        if not (tokens and rows and token and row and total and type(width) is int):
            return None
        return cls(
            num_ranks=region.num_ranks,
            num_experts=region.num_ranks * region.num_local_experts,
            tokens=tokens,
            rows=rows,
            width=width,
            room=way.room,
            token_bytes=token,
            row_bytes=row,
            sum_bytes=total,
        )

    @property
    def room_rows(self) -> float:
        """Return the rows there is room for."""
        return self.rows * self.room

    def leaving_bytes(self, rows: int, row_bytes: int) -> float:
        """Return the bytes that leave a rank which has `rows` of `row_bytes` bytes each."""
        return float((self.num_ranks - 1) * rows * row_bytes)

    @property
    def routing_bytes(self) -> float:
        """Return the bytes of counts and token numbers that leave a rank."""
        return self.leaving_bytes(self.num_experts + self.rows, NUMBER_BYTES)

    @property
    def picked_bytes(self) -> float:
        """Return the bytes of all rows picked from the tokens."""
        return self.room_rows * self.width * self.token_bytes

    @property
    def unpicked_bytes(self) -> float:
        """Return the bytes moved to give gradients of rows back to the tokens of all ranks.

        They are read, and added to zeros: written, read and written again.
        """
        return (
            self.picked_bytes + 3.0 * self.num_ranks * self.tokens * self.width * self.token_bytes
        )

    @property
    def added_bytes(self) -> float:
        """Return the bytes of all rows as they are added up."""
        return self.room_rows * self.width * self.row_bytes

    @property
    def sums_bytes(self) -> float:
        """Return the bytes moved for the sums: zeros, read and written again, and their cast."""
        sums = self.num_ranks * self.tokens * self.width
        cast = self.row_bytes + self.sum_bytes if self.row_bytes != self.sum_bytes else 0
        return float(sums * (3 * self.row_bytes + cast))

    @property
    def part_bytes(self) -> float:
        """Return the bytes of a rank's tokens, or of their sums, whichever are more."""
        return float(self.tokens * self.width * max(self.token_bytes, self.sum_bytes))

    @property
    def extra_bytes(self) -> float:
        """Return the bytes alive at once beside those of a rank's rows before they are sent."""
        return max(0.0, self.num_ranks - self.rows / self.tokens) * self.part_bytes
