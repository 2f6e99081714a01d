"""Decide whether the grouped products of a region's experts are computed in eight bits.

Contract
    A region need not be proven, nor chunked: a row of a product in eight bits depends on that row
    and on its expert's weight alone, as the row of any product.
    All grouped products of a region are computed alike, or none.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.fx as fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.rates import Rates
from moe_compile.cost.read_regions import work_of_experts
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.graph.query import operator_at, tensor_of
from moe_compile.hardware.chip_limits import multiplies_in_eight_bits
from moe_compile.journal.left import Left
from moe_compile.journal.reasons import Reason
from moe_compile.ops.product_formats import FORMATS, ProductFormat
from moe_compile.ops.scaled_products import AS_IT_IS
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.product_times import ProductTimes, product_times
from moe_compile.plan.state import CompileState
from moe_compile.regions.grouped_products import EightBits, factors_of, is_grouped
from moe_compile.regions.regions import MoERegion
from passes.kinds.by_counts.draft import Draft
from passes.kinds.by_counts.wires import makes_integers, plan_wires

OPTION: Final = "expert_compute"
PREFIX: Final = "fp8_"
PASS: Final = "quantize_products"
"""The pass that carries it out."""


def how_asked(config: MegaMoEConfig) -> EightBits | None:
    """Return how the options have products computed; None for the model's own number format."""
    if not config.asks_for(OPTION):
        return None
    gradient = config.expert_gradients
    return EightBits(
        recipe=config.expert_compute.removeprefix(PREFIX),
        gradient=AS_IT_IS if gradient == "same" else gradient,
    )


def find_products(region: MoERegion, config: MegaMoEConfig) -> tuple[fx.Node, ...] | Left:
    """Return the products to compute in eight bits, or why the region keeps its number format."""
    how = how_asked(config)
    if how is None:
        return Left(Reason.NOT_ASKED)
    if PASS in config.disable_passes:  # no pass would do it: no price
        return Left(Reason.DISABLED)
    products = tuple(node for node in region.row_side if is_grouped(node))
    if not products:
        return Left(Reason.NO_GROUPED_PRODUCT)
    for node in products:
        if (why := _against(node, FORMATS[how.recipe])) is not None:
            return why
    return Left(Reason.INTEGERS) if makes_integers(region) else products


def _against(product: fx.Node, chosen: ProductFormat) -> Left | None:
    """Return why a product keeps its number format."""
    rows, weight, _ = factors_of(product)
    if rows is None:
        detail = f"{operator_at(product)} has a bias, or a type of its own"
        return Left(Reason.NO_GROUPED_PRODUCT, detail)
    left, right = tensor_of(rows), tensor_of(weight)
    if left is None or right is None or is_traceable_wrapper_subclass(right):
        detail = f"{operator_at(product)} has a weight that is no plain tensor"
        return Left(Reason.NO_GROUPED_PRODUCT, detail)
    types, dims = (left.dtype, right.dtype), (left.dim(), right.dim())
    if types != (torch.bfloat16, torch.bfloat16) or dims != (2, 3):
        detail = f"{operator_at(product)} multiplies no rows [R, K] by [E, K, N] of bfloat16"
        return Left(Reason.NO_GROUPED_PRODUCT, detail)
    if any(not isinstance(n, int) or n % chosen.multiple for n in right.shape[1:]):
        detail = f"{chosen.multiple} divides K and N of no such product: {operator_at(product)}"
        return Left(Reason.NO_GROUPED_PRODUCT, detail)
    if not multiplies_in_eight_bits(left.device, chosen.capability):
        return Left(Reason.NO_E4M3, "grouped products in eight bits need 9.0 or higher")
    return None


def predicted_products(
    draft: Draft, state: CompileState, layer: TracedNodes
) -> ProductTimes | None:
    """Return the predicted times of a region's products in eight bits.

    None without such products, and where ranks may have other sizes.
    """
    found, proof = draft.found, draft.proof
    is_priced = state.config.equal_tokens and not isinstance(found.products, Left)
    if not is_priced or isinstance(proof, Left):
        return None
    work = work_of_experts(found.region, proof, state.hardware, layer)
    rates = Rates.of(state.hardware, found.region.num_ranks)
    return None if work is None else product_times(work, rates, _candidate(draft, state.config))


def _candidate(draft: Draft, config: MegaMoEConfig) -> Candidate:
    """Return how a region runs by the decisions on it so far."""
    wires, _ = plan_wires(draft, config)
    return Candidate(
        num_chunks=draft.num_chunks,
        chunk_by="tokens" if draft.by_tokens else "experts",
        dispatch_wire=wires["dispatch"],
        combine_wire=wires["combine"],
        dispatch="all_to_all" if draft.gathered is None else "all_gather",
        nodes=draft.nodes,
        hop_slices=draft.num_slices,
    )


def products_in_eight_bits(state: CompileState) -> dict[fx.Node, EightBits]:
    """Return the products of the graph at hand to compute in eight bits, and how."""
    how, found = how_asked(state.config), state.found.experts
    if how is None:
        return {}
    return {n: how for one in found if not isinstance(one.products, Left) for n in one.products}
