"""When tokens are worth gathering: bytes, padding and the two rules, from static facts.

Contract
    A function of the options and of static facts of the region: the same on every rank.

With n ranks, k rows per token and experts evenly loaded, a rank sends per token, there and back
alike (MegaScale-MoE, section 3.2)

    all-to-all                     k (n - 1) / n  rows
    all-gather, reduce-scatter     n - 1          rows

so that gathering moves less where k > n. Measured there on 8 GPUs of one node it was faster
already for k > 6: neighbours exchange with neighbours, not everyone with everyone. That is the
second rule, k > 0.75 n, and the one that `dispatch = "auto"` follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moe_compile.analysis.regions import MoERegion
from moe_compile.analysis.token_regions import TokenRows
from moe_compile.graph.query import tensor_of

MEASURED_SHARE: Final = 0.75
"""Of n, k beyond which gathering was faster: Mixtral-8x7B shapes, 8 GPUs (figure 7 there)."""
EXACT_ADDENDS: Final = 2
"""Rows whose sum does not depend on the order: beyond, each order rounds in its own way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchCosts:
    """What moving the rows of one region costs either way."""

    num_ranks: int
    rows_per_token: float
    row_bytes: int
    """Bytes of a row as it is gathered, without the numbers and factors that go with it."""
    padding: float
    """Rows there must be room for in the worst case, over the rows of balanced experts."""

    @property
    def all_to_all_bytes(self) -> float:
        """Bytes a rank sends per token, each way, by all-to-all."""
        n = self.num_ranks
        return self.rows_per_token * self.row_bytes * (n - 1) / n

    @property
    def all_gather_bytes(self) -> float:
        """Bytes a rank sends per token, each way, by all-gather or reduce-scatter."""
        return float(self.row_bytes * (self.num_ranks - 1))

    @property
    def by_volume(self) -> bool:
        """Whether gathering moves less."""
        return self.rows_per_token > self.num_ranks

    @property
    def by_measurement(self) -> bool:
        """Whether gathering was faster where it was measured."""
        return self.rows_per_token > MEASURED_SHARE * self.num_ranks


def dispatch_costs(region: MoERegion, found: TokenRows) -> DispatchCosts | None:
    """Return the costs of `region`, or None where sizes are not known."""
    tokens, index = tensor_of(found.tokens), tensor_of(found.index)
    assert tokens is not None and index is not None
    k: float | None = found.rows_per_token
    if k is None:
        sizes = index.shape[0], tokens.shape[0]
        k = sizes[0] / sizes[1] if all(type(size) is int for size in sizes) else None
    width = tokens.shape[1]
    if k is None or type(width) is not int:
        return None
    most = k
    if found.is_chosen_once:
        most = min(k, region.num_local_experts)
    return DispatchCosts(
        num_ranks=region.num_ranks,
        rows_per_token=k,
        row_bytes=width * tokens.element_size(),
        padding=region.num_ranks * most / k,
    )


def num_addends(found: TokenRows) -> int | None:
    """Return how many numbers each sum per token adds, None when they are not proven to be one."""
    if found.rows_per_token is None:
        return None
    return found.rows_per_token + (found.base is not None)


def is_bitwise(found: TokenRows) -> bool:
    """Whether no sum, forward or backward, adds more than two numbers."""
    addends = num_addends(found)
    return addends is not None and addends <= EXACT_ADDENDS
