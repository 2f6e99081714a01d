"""Shares of a region's rows by where they go, when a token crosses to a node once.

Contract
    Amounts for experts chosen evenly, each once by a token. Facts of graph and registration alone.
    The planner's prices and the cluster simulator both take the bytes on links from here; passes
    over rows, which the planner cuts by parts, are the simulator's. Without torch:
    `megamoe simulate` has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from moe_compile.hardware.links import leaving_share

INDEX_KERNELS: Final = 40.0
"""Small operators that find the rows of both hops (`moe_compile/ops/hop_rows.py`), as written; no
generated code was counted."""
PLACE_KERNELS: Final = 6.0
"""Kernels that find where sums go (`moe_compile/ops/two_hops.py`), on nodes and at home."""
MASK_BYTES: Final = 4.0
"""Bytes of a row's mask in hop 1, the experts of a node it is for: one word of 32 bits."""
SCORE_BYTES: Final = 4.0
"""Bytes of a row's score, which is sent flat."""
MOVED: Final = 2.0
"""Passes over bytes that are moved: one read, one write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HopShape:
    """The ranks, the experts and the rows of one region."""

    num_nodes: int
    num_local: int
    """Ranks of a node."""
    num_experts: int
    """Experts of all ranks."""
    rows_per_token: int
    row_bytes: float
    """Bytes of one row, as it is dispatched."""
    max_nodes: int = 0
    """Nodes that the experts of one token may be on, where its router limits them; 0: no limit."""

    @property
    def leaving(self) -> float:
        """Share of evenly spread bytes that goes to another node."""
        return (self.num_nodes - 1) / self.num_nodes

    @property
    def nodes_per_token(self) -> float:
        """Nodes that a token needs: those of its experts, drawn without repetition."""
        elsewhere = self.num_experts - self.num_experts // self.num_nodes
        k = self.rows_per_token
        missed = math.comb(elsewhere, k) / math.comb(self.num_experts, k)
        hit = self.num_nodes * (1.0 - missed)
        return min(hit, float(self.max_nodes)) if self.max_nodes else hit

    @property
    def flat_rows(self) -> float:
        """Rows of a token that cross to another node in one flat exchange."""
        return self.rows_per_token * self.leaving

    @property
    def hop_rows(self) -> float:
        """Rows of a token that cross in hop 1."""
        return self.nodes_per_token * self.leaving

    def rows_between(self, nodes: str) -> float:
        """Rows of a token that cross in all four exchanges, forward and backward."""
        num_in_hops = {"off": 0, "exact": 2, "rounded": 4}[nodes]
        return num_in_hops * self.hop_rows + (4 - num_in_hops) * self.flat_rows

    def across_bytes(self, rows: float) -> float:
        """Bytes of hop 1 that leave a rank, of so many bytes of its rows."""
        return rows / self.rows_per_token * self.hop_rows

    def inside_bytes(self, rows: float) -> float:
        """Bytes of hop 2 that leave a rank, of so many bytes of its rows."""
        return rows * (self.num_local - 1) / self.num_local

    def mask_bytes(self, num_rows: float) -> float:
        """Bytes of the masks beside hop 1 that leave a rank of so many rows."""
        return num_rows / self.rows_per_token * self.hop_rows * MASK_BYTES

    def score_bytes(self, num_rows: float) -> float:
        """Bytes of the scores of so many rows, or of their gradients, that leave a rank."""
        return num_rows * SCORE_BYTES * leaving_share(self.num_nodes * self.num_local)

    def copied_bytes(self, rows: float) -> tuple[float, float, float]:
        """Bytes moved where rows are copied: before hop 1, between the hops, after hop 2."""
        return MOVED * self.far_bytes(rows), MOVED * rows, MOVED * rows

    def summed_bytes(self, rows: float) -> tuple[float, float, float]:
        """Bytes moved where rows are summed: before hop 2, on the node, at home."""
        far = self.far_bytes(rows)
        return MOVED * rows, rows + far, far + rows / self.rows_per_token

    def far_bytes(self, rows: float) -> float:
        """Return the bytes of one row for each node of a token, the own included."""
        return rows * self.nodes_per_token / self.rows_per_token
