"""Error bounds of sums per token that are made on the nodes first.

Contract
    A bound on |error|, over the sum S of the magnitudes of a sum's terms: of the very terms that
    the model adds up.

A sum is made in float32, on each node, then of the nodes' sums at home: each term takes part in
fewer additions than there are terms. Three values are rounded to the type of the sum, with unit
roundoff u: the products of rows and weights where these are no rows of that type yet, the sum of
a node, and the sum at home:

    |error| <= ((1 + u)^3 - 1) S + (k + 2) 2^-24 S        k terms; float64 sums with 2^-53

In eight bits rows are packed inside the node and the sums of nodes again, and each is rounded to
the type of the sum when it is unpacked. With q the part of a number that packing may take, and A
the sum of the largest magnitudes in the terms' blocks of columns, of which packing may take t
(`ops/wire_format.py`):

    |error| <= ((1 + q)^2 (1 + u)^5 - 1) S + (1 + q)^2 (k + 2) 2^-24 S + 2 (1 + q)^2 (1 + u)^5 t A
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_compile.graph.query import tensor_of
from moe_compile.ops.wire_format import E4M3_MAX, error_bound
from moe_compile.plan.dispatch_rules import num_products
from moe_compile.regions.token_regions import TokenRows


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRounding:
    """Error bounds of the sums of one region."""

    num_addends: int
    """Number of terms of a sum of results, the number it is added to included."""
    dtype: torch.dtype
    """Type of a sum."""
    gradient_bound_eps: int | None
    """The same as in `dispatch_rules.Rounding`: products of rows and gradients add up elsewhere."""
    in_eight_bits: tuple[str, ...] = ()
    """Those of the sums `results` and `gradients` whose terms travel in eight bits."""

    @property
    def bound(self) -> float:
        """Largest error over the sum of the terms' magnitudes."""
        return (1 + self.unit) ** 3 - 1 + (self.num_addends + 2) * self.unit_of_sums

    @property
    def bound_in_eight_bits(self) -> float:
        """Largest such error where terms travel in eight bits, beside `bound_of_blocks`."""
        packed = (1 + error_bound(1.0, 0.0)) ** 2
        return packed * ((1 + self.unit) ** 5 + (self.num_addends + 2) * self.unit_of_sums) - 1

    @property
    def bound_of_blocks(self) -> float:
        """Error added per sum of the largest magnitudes in the terms' blocks of columns."""
        packed = (1 + error_bound(1.0, 0.0)) ** 2 * (1 + self.unit) ** 5
        return 2 * packed * error_bound(0.0, 1 / E4M3_MAX)

    @property
    def unit(self) -> float:
        """Unit roundoff of the type of a sum."""
        return torch.finfo(self.dtype).eps / 2

    @property
    def unit_of_sums(self) -> float:
        """Unit roundoff of the type in which sums are made."""
        return min(self.unit, torch.finfo(torch.float32).eps / 2)

    @property
    def numerics(self) -> str:
        """The least value of the option `numerics` at which "auto" may choose it."""
        return "lossy" if self.gradient_bound_eps is None else "bounded"


def node_rounding_of(found: TokenRows, in_eight_bits: tuple[str, ...] = ()) -> NodeRounding | None:
    """Return the rounding of sums per token that are made on the nodes; None: no known bound.

    `in_eight_bits` is that of `NodeRounding`.
    """
    total = tensor_of(found.sums.total)
    if total is None or found.rows_per_token is None:
        return None
    return NodeRounding(
        num_addends=found.rows_per_token + (found.sums.base is not None),
        dtype=total.dtype,
        gradient_bound_eps=num_products(found.sums),
        in_eight_bits=in_eight_bits,
    )
