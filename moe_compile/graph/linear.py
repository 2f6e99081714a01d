"""Operators of AOTAutograd's graphs that are linear: they cast, scale, add or lay out anew.

Contract
    A linear operator is so element by element, except for rounding: the sum of two results is the
    result for the sum, apart from a constant added. An operator that is not listed here is said not
    to be linear, pointwise ones too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.query import tensor_of

ATEN: Final = torch.ops.aten
COPIES: Final = frozenset(
    {
        ATEN._to_copy.default,
        ATEN._unsafe_view.default,
        ATEN.clone.default,
        torch.ops.prims.convert_element_type.default,
    }
)
SUMS: Final = frozenset(
    {
        ATEN.add.Tensor,
        ATEN.add.Scalar,
        ATEN.sub.Tensor,
        ATEN.sub.Scalar,
        ATEN.rsub.Tensor,
        ATEN.rsub.Scalar,
        ATEN.neg.default,
    }
)
PRODUCTS: Final = frozenset({ATEN.mul.Tensor, ATEN.mul.Scalar})
QUOTIENTS: Final = frozenset({ATEN.div.Tensor, ATEN.div.Scalar})


def is_linear(node: fx.Node, varying: Collection[fx.Node]) -> bool:
    """Whether `node` is linear in those of its inputs that are `varying`, the others held."""
    target, value = node.target, tensor_of(node)
    if not isinstance(target, torch._ops.OpOverload) or value is None:
        return False
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return False  # a cast to integers drops fractions
    if target in SUMS or target in COPIES:
        return True
    if target in PRODUCTS:
        return sum(factor in varying for factor in node.args) <= 1
    if target in QUOTIENTS:
        return node.args[1] not in varying
    return target.is_view and target is not ATEN.view.dtype  # that one reinterprets bits
