"""Grouped products of a Dynamo graph: rows up to each offset by the matrix of their expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx as fx
import torch.nn.functional as F

from moe_compile.graph.edit import call_otherwise
from moe_compile.graph.query import argument_of
from moe_compile.ops.scaled_products import GROUPED_MM_FP8, QUANTIZE_ROWS

GROUPED: Final = tuple(
    getattr(module, name)
    for module, name in ((torch, "_grouped_mm"), (F, "grouped_mm"))
    if hasattr(module, name)
)
"""Grouped products, by the names that releases of torch have for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EightBits:
    """How grouped products in eight bits are computed, as the operator names it."""

    recipe: str
    gradient: str
    """Number format in which the gradients of rows are multiplied."""


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


def takes_messages(node: fx.Node) -> bool:
    """Whether a node of an ATen graph quantises rows as messages of exchanges are quantised."""
    if node.target is not QUANTIZE_ROWS:
        return False
    recipe, element = argument_of(node, 1, "recipe"), argument_of(node, 2, "element")
    return recipe == "blockwise" and element in (None, "e4m3")


def compute_in_eight_bits(node: fx.Node, how: EightBits) -> None:
    """Have a grouped product quantise its rows and its weight, and multiply these."""
    call_otherwise(node, GROUPED_MM_FP8, *factors_of(node), how.recipe, how.gradient)
