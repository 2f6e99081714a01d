"""How much of a region's rows goes which way when a token crosses to a node once.

Contract
    Amounts for experts chosen evenly, each once by a token. Facts of graph and registration alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HopShape:
    """The ranks, the experts and the rows of one region."""

    num_nodes: int
    num_local: int
    """Ranks of a node."""
    num_experts: int
    """Of all ranks."""
    rows_per_token: int
    row_bytes: float
    """Of one row, as it is dispatched."""

    @property
    def leaving(self) -> float:
        """Share of what is spread evenly over nodes that is for another node."""
        return (self.num_nodes - 1) / self.num_nodes

    @property
    def nodes_per_token(self) -> float:
        """Nodes that a token needs: as many as its experts, drawn without repetition, are on."""
        elsewhere = self.num_experts - self.num_experts // self.num_nodes
        k = self.rows_per_token
        missed = math.comb(elsewhere, k) / math.comb(self.num_experts, k)
        return self.num_nodes * (1.0 - missed)

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
