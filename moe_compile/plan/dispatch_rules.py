"""When tokens are worth gathering: bytes, padding and the two rules, from static facts.

Contract
    A function of the options and of static facts of the region: the same on every rank.

With n ranks, k rows per token and experts evenly loaded, a rank sends per token, there and back
alike (MegaScale-MoE, section 3.2)

    all-to-all                     k (n - 1) / n  rows
    all-gather, reduce-scatter     n - 1          rows

so that gathering moves less where k > n. Measured there on 8 GPUs of one node it was faster
already for k > 6: neighbours exchange with neighbours, not everyone with everyone. That is the
second rule, k > 0.75 n, which `dispatch = "auto"` follows where there is nothing to price.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import has_gradient, tensor_of
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.token_regions import TokenRows, TokenSum

MEASURED_SHARE: Final = 0.75
"""Share of n beyond which, for k, gathering was faster: Mixtral-8x7B shapes, 8 GPUs (figure 7)."""
EXACT_ADDENDS: Final = 2
"""Largest number of rows whose sum does not depend on the order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchCosts:
    """Costs of moving the rows of one region either way."""

    num_ranks: int
    rows_per_token: int
    row_bytes: int
    """Bytes of a row as it is gathered, without the numbers and factors sent with it."""

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
        """Whether gathering was faster in the measurement."""
        return self.rows_per_token > MEASURED_SHARE * self.num_ranks


def dispatch_costs(region: MoERegion, found: TokenRows) -> DispatchCosts | None:
    """Return the costs of `region`, or None where sizes are not known alike on every rank."""
    tokens, k = tensor_of(found.tokens), found.mean_rows_per_token
    assert tokens is not None
    width = tokens.shape[1]
    if k is None or type(width) is not int:
        return None
    return DispatchCosts(
        num_ranks=region.num_ranks,
        rows_per_token=k,
        row_bytes=width * tokens.element_size(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """How far a token's sums, forward and backward, and gradients of weights may be from eager's.

    With a unit roundoff of eps / 2, a sum of m numbers in any order is off by at most
    (m - 1) eps / 2 of the sum of their magnitudes, to first order (Higham, section 4.2), and two
    orders differ by at most twice that. A weighted sum adds products before it rounds: each rank's
    share of it is rounded once more, at most m shares. The gradient of a weight is a product of
    two vectors of D numbers, off by at most D eps / 2 in any order (section 3.1 there).
    """

    num_addends: int | None
    """Numbers that each sum adds; None where they are not proven to be equally many."""
    is_weighted: bool
    gradient_bound_eps: int | None = 0
    """Largest difference of a weight's gradient, as `bound_eps`; 0 where weights have none."""

    @property
    def is_bitwise(self) -> bool:
        """Whether nothing differs."""
        return self.bound_eps == 0 == self.gradient_bound_eps

    @property
    def numerics(self) -> str:
        """The least value of the option `numerics` at which "auto" may choose it."""
        if self.is_bitwise:
            return "exact"
        is_bounded = self.bound_eps is not None and self.gradient_bound_eps is not None
        return "bounded" if is_bounded else "lossy"

    @property
    def bound_eps(self) -> int | None:
        """Largest difference of a sum, in eps times the sum of magnitudes; None where not known."""
        if self.num_addends is None:
            return None
        most = 1 if self.is_weighted else EXACT_ADDENDS
        return 0 if self.num_addends <= most else self.num_addends - (not self.is_weighted)


def quantises_rows(config: MegaMoEConfig) -> bool:
    """Whether a wire option asks for rows of eight bits, which gathered tokens do not have."""
    return any(wire.startswith("fp8") for wire in (config.dispatch_wire, config.combine_wire))


def rounding_of(found: TokenRows) -> Rounding:
    """Return how sums per token round where tokens are gathered."""
    addends = found.rows_per_token
    if addends is not None and found.sums.base is not None:
        addends += 1
    return Rounding(
        num_addends=addends,
        is_weighted=found.sums.weights is not None,
        gradient_bound_eps=num_products(found.sums),
    )


def num_products(sums: TokenSum) -> int | None:
    """Return how many products the gradient of a weight of `sums` adds; None: not known."""
    if sums.weights is None or not (has_gradient(sums.weights) and has_gradient(sums.total)):
        return 0
    total = tensor_of(sums.total)
    assert total is not None
    return total.shape[1] if type(total.shape[1]) is int else None
