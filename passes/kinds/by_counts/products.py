"""Decide whether the grouped products of a region's experts are computed in eight bits.

Contract
    A region need not be proven, nor chunked: a row of a product in eight bits depends on that row
    and on its expert's weight alone, as the row of any product.
    The grouped products of a region are computed as options ask, or all as in the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
import torch.fx as fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_compile.allowed_values import FORWARD_PRODUCTS
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.rates import Rates
from moe_compile.cost.read_regions import work_of_experts
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.errors import ContractViolation
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.query import operator_at, tensor_of
from moe_compile.hardware.chip_limits import multiplies_in_eight_bits
from moe_compile.journal.reasons import Left, Reason
from moe_compile.ops.product_formats import FORMATS, ProductFormat
from moe_compile.ops.scaled_products import AS_IT_IS
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.product_times import ProductTimes, product_times
from moe_compile.plan.state import CompileState
from moe_compile.regions.grouped_products import EightBits, factors_of, is_grouped, names_of
from moe_compile.regions.regions import MoERegion
from passes.kinds.by_counts.draft import Draft
from passes.kinds.by_counts.wires import makes_integers, plan_wires

OPTION: Final = "expert_compute"
FORMS: Final = {
    "fp8_rowwise": ("rowwise", "e4m3"),
    "fp8_blockwise": ("blockwise", "e4m3"),
    "fp8_blockwise_e5m2": ("blockwise", "e5m2"),
}
"""Values of the option, with the recipe and the element type of gradients."""
PASS: Final = "quantize_products"
"""The pass that carries it out."""
OTHER_FORM: Final = (
    "it must have one or two products of the rows, whose results are combined, and then one "
    "more; it has others"
)


def how_asked(
    products: Sequence[fx.Node], facts: GraphFacts, config: MegaMoEConfig
) -> Mapping[fx.Node, EightBits] | Left:
    """Return how the options have some of the grouped products of experts computed in eight bits.

    Or why that cannot be told: `fp8_products` names one of two products that are one, or that
    cannot be told apart.
    """
    recipe, gradient = FORMS[config.expert_compute]
    chosen = set(config.fp8_products)
    names: Mapping[fx.Node, frozenset[str]] | None
    names = dict.fromkeys(products, frozenset(FORWARD_PRODUCTS))
    if 0 < len(chosen.intersection(FORWARD_PRODUCTS)) < len(FORWARD_PRODUCTS):
        names = names_of(products, facts.dependence)
    if names is None:
        return Left(Reason.PRODUCTS_TOGETHER, OTHER_FORM)
    found = {}
    for product, own in names.items():
        if own & chosen and not own <= chosen:
            detail = (
                f"{operator_at(product)} computes gate and up together, or it is not known "
                "which of the two it computes"
            )
            return Left(Reason.PRODUCTS_TOGETHER, detail)
        how = EightBits(
            recipe=recipe,
            product="e4m3" if own & chosen else AS_IT_IS,
            grad_input=gradient if "grad_input" in chosen else AS_IT_IS,
            grad_weight=gradient if "grad_weight" in chosen else AS_IT_IS,
        )
        if how.is_any:
            found[product] = how
    return found


def find_products(region: MoERegion, config: MegaMoEConfig) -> Mapping[fx.Node, EightBits] | Left:
    """Return how products are computed in eight bits, or why the region keeps its number format."""
    if not config.asks_for(OPTION):
        return Left(Reason.NOT_ASKED)
    if PASS in config.disable_passes:  # no pass would do it: no price
        return Left(Reason.DISABLED)
    products = [node for node in region.row_side if is_grouped(node)]
    if not products:
        return Left(Reason.NO_GROUPED_PRODUCT)
    for node in products:
        if (why := _against(node, FORMATS[FORMS[config.expert_compute][0]])) is not None:
            return why
    if makes_integers(region):
        return Left(Reason.INTEGERS)
    return how_asked(products, region.facts, config)


def _against(product: fx.Node, chosen: ProductFormat) -> Left | None:
    """Return why a product keeps its number format."""
    rows, weight, _ = factors_of(product)
    if rows is None:
        detail = f"{operator_at(product)} must have no bias and no out_dtype, and has one"
        return Left(Reason.NO_GROUPED_PRODUCT, detail)
    left, right = tensor_of(rows), tensor_of(weight)
    if left is None or right is None or is_traceable_wrapper_subclass(right):
        detail = (
            f"{operator_at(product)} must have a plain tensor as weight, and has another "
            "class of tensor"
        )
        return Left(Reason.NO_GROUPED_PRODUCT, detail)
    types, dims = (left.dtype, right.dtype), (left.dim(), right.dim())
    if types != (torch.bfloat16, torch.bfloat16) or dims != (2, 3):
        detail = (
            f"{operator_at(product)} must multiply rows [R, K] by weights [E, K, N], both of "
            "bfloat16, and does not"
        )
        return Left(Reason.NO_GROUPED_PRODUCT, detail)
    if any(not isinstance(n, int) or n % chosen.multiple for n in right.shape[1:]):
        detail = (
            f"{operator_at(product)} must have weights [E, K, N] whose K and N are multiples "
            f"of {chosen.multiple}, and has not"
        )
        return Left(Reason.NO_GROUPED_PRODUCT, detail)
    if not multiplies_in_eight_bits(left.device, chosen.capability):
        return Left(
            Reason.NO_E4M3,
            "grouped products in eight bits need a GPU of compute capability 9.0 or higher",
        )
    return None


def how_planned(
    products: Sequence[fx.Node], facts: GraphFacts, config: MegaMoEConfig
) -> Mapping[fx.Node, EightBits]:
    """Return the same of a region that is planned so, in a graph in which it is rewritten.

    Raises ContractViolation where the rewrite gave its products another form.
    """
    found = how_asked(products, facts, config)
    if isinstance(found, Left):
        raise ContractViolation(f"products of a rewritten region: {found}")
    return found


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
    found = (one.products for one in state.found.experts if not isinstance(one.products, Left))
    return {node: how for products in found for node, how in products.items()}
