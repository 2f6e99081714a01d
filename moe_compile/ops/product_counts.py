"""Grouped matrix products count as compute for torch's flop counter and its readers.

Contract
    `FlopCounterMode` counts forward and backward of grouped products; Inductor's own estimates,
    which look into the counter's registry, take them for compute.
    A formula that torch or the program has registered is left as it is.
    Rows in no group (those after the last offset) are counted too: shapes do not show them.

Torch 2.13 has formulas for mm, bmm and scaled_mm, and none for grouped products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from moe_compile.ops.scaled_products import SCALED_GROUPED_MM
from moe_compile.ops.weight_gradients import SCALED_WEIGHT_GRADIENT

GROUPED: Final = ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
"""Operators of `torch.ops.aten`; a torch may have fewer."""
BY_GROUP: Final = 3
"""Dimensions of an operand with a matrix per group; with two, offsets divide its rows."""


def grouped_product_flops(
    left: Sequence[int], right: Sequence[int], *_: object, **_options: object
) -> int:
    """Return operations of a grouped product, two per multiply-add, from its operands' shapes.

    `[R, K] x [G, K, N]` rows by their group's matrix; `[G, M, K] x [K, R]` columns likewise;
    `[M, R] x [R, N] -> [G, M, N]` a weight gradient, R parted into groups; `[G, M, K] x [G, K, N]`.
    Groups divide one dimension: each row is computed once, so that the number of groups does not
    count, unless both operands have it.
    """
    columns = right[-1]
    is_parted_by_columns = len(left) == BY_GROUP and len(right) < BY_GROUP
    rows = left[-2] if is_parted_by_columns else math.prod(left[:-1])
    return 2 * rows * left[-1] * columns


def scaled_product_flops(
    rows: Sequence[int], row_scales: object, weight: Sequence[int], *_: object, **_options: object
) -> int:
    """Return operations of our product in eight bits; scales are not counted, as torch does not."""
    del row_scales
    return grouped_product_flops(rows, weight)


def weight_gradient_flops(
    rows: Sequence[int],
    row_scales: object,
    grads: Sequence[int],
    grad_scales: object,
    offs: Sequence[int],
    *_: object,
    **_options: object,
) -> int:
    """Return operations of a weight gradient in eight bits, of the whole blocks of its rows.

    Rows that fill no block are not counted: groups may have up to as many blocks more as there are
    groups, and shapes do not show these.
    """
    del row_scales, grad_scales
    return 2 * (rows[0] - offs[0]) * rows[2] * rows[1] * grads[1]


def count_grouped_products() -> None:
    """Register formulas for grouped products that have none."""
    formulas: dict[Any, Callable[..., int]] = {
        getattr(torch.ops.aten, name, None): grouped_product_flops for name in GROUPED
    }
    formulas[SCALED_GROUPED_MM.overloadpacket] = scaled_product_flops
    formulas[SCALED_WEIGHT_GRADIENT.overloadpacket] = weight_gradient_flops
    for packet, formula in formulas.items():
        if packet is not None and packet not in flop_registry:
            register: Callable[[Any], Any] = register_flop_formula(packet)
            register(formula)
