"""Compute the grouped products of chosen regions in eight bits.

Contract
    Requires  PLANNED, REWRITTEN.
    Keeps     every node but the products, and all exchanges. The product of a row depends on that
              row and its expert's weight alone, so that chunks have the bits of the whole.
    Loses     at most `BOUND`; only where the plan says so.

    grouped_mm(rows, weight, offs)
        becomes  grouped_mm_fp8(rows, weight, offs, recipe, product, grad_input, grad_weight)

AOTAutograd derives the backward, and sees its parts: rows and weights that are quantised, and
products of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch.fx as fx

from moe_compile.plan.planned import PlannedExperts
from moe_compile.plan.state import CompileState
from moe_compile.regions.grouped_products import EightBits, compute_in_eight_bits, is_grouped
from passes.contract import Fact
from passes.kinds.by_counts.products import how_planned
from passes.rewrite import Proposed, Rewrite

BOUND: Final = (
    "each number of both factors is off by at most 2^-4 of itself or 2^-10 of its scale, each "
    "of gradients in e5m2 by 2^-3 or 2^-17, whichever is larger; a product of K terms by 128 u + "
    "(K + 3) 2^-24 times the sum of their magnitudes more, u = 2^-13 in tensor cores of Hopper and "
    "2^-24 elsewhere"
)
"""See `moe_compile/testing/product_errors.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InEightBits:
    """The grouped products of one region."""

    region: str
    """Its name."""
    products: tuple[tuple[str, EightBits], ...]
    """Names of the nodes, those of all chunks, and how each is computed."""
    compute: str
    chosen: tuple[str, ...]
    """Number format, and names of the products in it, as the options have them."""

    def __str__(self) -> str:
        """Return its name in reports."""
        number = len(self.products)
        products = "1 grouped product" if number == 1 else f"{number} grouped products"
        return f"{products} of {self.region}: {self.compute} ({', '.join(self.chosen)})"


@dataclass(frozen=True)
class QuantizeProducts(Rewrite[InEightBits]):
    """See the module docstring."""

    name: ClassVar[str] = "quantize_products"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PLANNED, Fact.REWRITTEN})
    after: ClassVar[frozenset[str]] = frozenset({"quantize_exchanges"})
    numerics: ClassVar[str] = "lossy"
    bound: ClassVar[str] = BOUND
    is_decided: ClassVar[bool] = True
    by_region: ClassVar[bool] = True

    def propose(self, graph: fx.Graph, state: CompileState) -> Proposed[InEightBits]:
        """Return the products of regions that are planned in eight bits, chunked or not."""
        found = (
            InEightBits(
                region=one.found.region.name,
                products=_products(one, graph, state),
                compute=one.plan.expert_compute,
                chosen=one.plan.fp8_products,
            )
            for one in state.experts
            if one.plan.expert_compute != "same"
        )
        return Proposed(proposals=tuple(found))

    def region_of(self, proposal: InEightBits) -> str:
        """Return the name of its region."""
        return proposal.region

    def apply(
        self, graph: fx.Graph, proposals: tuple[InEightBits, ...], state: CompileState
    ) -> None:
        """Have each product quantise what it multiplies."""
        del state
        nodes = {node.name: node for node in graph.nodes}
        for one in proposals:
            for name, how in one.products:
                compute_in_eight_bits(nodes[name], how)


def _products(
    one: PlannedExperts, graph: fx.Graph, state: CompileState
) -> tuple[tuple[str, EightBits], ...]:
    """Return the grouped products between a region's exchanges, as it was rewritten."""
    facts = state.facts_of(graph)
    dependence = facts.dependence
    launches = state.launches[one.found.region.name]
    inside = dependence.below(launches["dispatch"]) & dependence.above(launches["combine"])
    products = [node for node in dependence.in_order(inside) if is_grouped(node)]
    found = how_planned(products, facts, state.config)
    return tuple((node.name, how) for node, how in found.items())
