"""Grouped products of a Dynamo graph: rows up to each offset by the matrix of their expert.

Contract
    Products of experts have names by their place: the last product, on which no other depends, is
    "down"; those before it are "gate", whose result goes through an activation before it meets the
    other's, and "up". Products that cannot be told apart, or are one, have both names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx as fx
import torch.nn.functional as F

from moe_compile.allowed_values import FORWARD_PRODUCTS
from moe_compile.graph.dependence import Dependence
from moe_compile.graph.edit import call_otherwise
from moe_compile.graph.query import argument_of, called_name
from moe_compile.ops.scaled_products import AS_IT_IS, GROUPED_MM_FP8, QUANTIZE_ROWS

GROUPED: Final = tuple(
    getattr(module, name)
    for module, name in ((torch, "_grouped_mm"), (F, "grouped_mm"))
    if hasattr(module, name)
)
"""Grouped products, by the names that releases of torch have for them."""
ACTIVATIONS: Final = frozenset(
    {
        "elu", "exp", "gelu", "hardswish", "leaky_relu", "mish", "relu", "relu6", "selu",
        "sigmoid", "silu", "softplus", "tanh",
    }
)  # fmt: skip
"""Names of functions and methods of torch, one of which the gate goes through."""
GATE, UP, DOWN = FORWARD_PRODUCTS


@dataclass(frozen=True, kw_only=True, slots=True)
class EightBits:
    """How grouped products in eight bits are computed, as the operator names it."""

    recipe: str
    product: str
    """Element type to which its rows are quantised, or "bf16" if nothing is; so all below."""
    grad_input: str
    """The same for gradients, in the product that makes the gradient of its rows."""
    grad_weight: str
    """And in the product that makes the gradient of its weight."""

    @property
    def is_any(self) -> bool:
        """Whether one of its products is in eight bits."""
        return {self.product, self.grad_input, self.grad_weight} != {AS_IT_IS}


def is_grouped(node: fx.Node) -> bool:
    """Whether the node calls a grouped product, of any form."""
    return node.op == "call_function" and node.target in GROUPED


def factors_of(node: fx.Node) -> tuple[Any, Any, Any]:
    """Return rows `[R, K]`, weight `[E, K, N]` and offsets `[E]` of a grouped product.

    All three are None where it has another form: a bias, a type of its own, or no offsets.
    """
    others = argument_of(node, 3, "bias"), argument_of(node, 4, "out_dtype")
    offs = argument_of(node, 2, "offs")
    if len(node.args) < 2 or offs is None or any(one is not None for one in others):
        return None, None, None
    return node.args[0], node.args[1], offs


def names_of(
    products: Sequence[fx.Node], dependence: Dependence
) -> Mapping[fx.Node, frozenset[str]] | None:
    """Return the names that each of some experts' products has, chunk by chunk.

    None where they have another form than one or two products and then one.
    """
    below = {product: dependence.below([product]) for product in products}
    readers = {a: [b for b in products if b is not a and b in below[a]] for a in products}
    first: dict[fx.Node, list[fx.Node]] = {a: [] for a in products if not readers[a]}
    for product, later in readers.items():
        if len(later) == 1:
            first[later[0]].append(product)
        elif later:
            return None
    if any(len(before) not in (1, 2) for before in first.values()):
        return None
    found = {}
    for down, before in first.items():
        found[down] = frozenset({DOWN})
        own = {a: below[a].difference(*(below[b] for b in before if b is not a)) for a in before}
        gates = [a for a in before if _has_activation(own[a])]
        is_told_apart = len(before) == 2 and len(gates) == 1
        for product in before:
            name = {GATE} if product in gates else {UP}
            found[product] = frozenset(name if is_told_apart else {GATE, UP})
    return found


def _has_activation(nodes: Iterable[fx.Node]) -> bool:
    return any(called_name(node).partition(".")[0] in ACTIVATIONS for node in nodes)


def takes_messages(node: fx.Node) -> bool:
    """Whether a node of an ATen graph quantises rows as messages of exchanges are quantised."""
    if node.target is not QUANTIZE_ROWS:
        return False
    recipe, element = argument_of(node, 1, "recipe"), argument_of(node, 2, "element")
    return recipe == "blockwise" and element in (None, "e4m3")


def compute_in_eight_bits(node: fx.Node, how: EightBits) -> None:
    """Have a grouped product, or its gradients, quantise what is multiplied."""
    elements = how.product, how.grad_input, how.grad_weight
    call_otherwise(node, GROUPED_MM_FP8, *factors_of(node), how.recipe, *elements)
