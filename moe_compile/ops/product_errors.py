"""How far a product in eight bits may be from the exact one, element by element.

Contract
    A bound, not an estimate: of finite operands whose quantised product float32 holds.

Of one element, with h = 2**-4 for e4m3, 2**-3 for e5m2 and 2**-2 for e2m1 (`Element.half_unit`):

    quantised a        |a' - a| <= e(a) = max(h |a|, half_step * scale, |a| - largest * scale)
                       + 2**-20 |a|; the third is what recipe "nvfp4" cuts
    product            |a'b' - ab| <= (|a| + e(a)) (|b| + e(b)) - |a| |b|
                       of normal e4m3: |a| |b| (2**-4 + 2**-4 + 2**-8), and float32's roundings
    sum over K         each of 128 additions inside a block, by tensor cores or in float32, is off
                       by u of sum |a'b'| at most; all else by float32's roundings, K of them and 3
    result             rounded once to its type

So the error is at most

    sum_k [(|a| + e(a)) (|b| + e(b)) - |a| |b|]
    + (128 u + (K + 3) 2**-24) sum_k (|a| + e(a)) (|b| + e(b))
    + blocks * 2**-118 + half a unit of the result

2**-20 |a| is more than the four roundings of 448 / a, of the quotient's product, of the scale and
of its product. u is 2**-24 for sums in float32. Tensor cores of Hopper keep about 14 bits of a sum
(DeepSeek-V3, section 3.3.2): u = 2**-13. 2**-118 is more than the largest sum of a block, 128 * 448
* 57344, times half the least float32, by which a product of two scales may be off.
"""

from __future__ import annotations

from typing import Final

import torch

from moe_compile.ops.product_formats import (
    ELEMENTS,
    Element,
    blocks_along,
    format_of,
    scales_of_rows,
    scales_of_weight,
    weight_element,
)
from moe_compile.ops.scaled_products import quantize_rows, quantize_weight
from moe_compile.ops.wire_format import BLOCK

IN_FLOAT32: Final = 2.0**-24
IN_TENSOR_CORES: Final = 2.0**-13
"""Unit of a sum inside a block, of the share that its largest part is."""
ROUNDINGS: Final = 2.0**-20
TINY: Final = 2.0**-118


def product_error_bound(
    rows_RK: torch.Tensor,
    weight_KN: torch.Tensor,
    recipe: str,
    *,
    element: str = "e4m3",
    unit: float = IN_FLOAT32,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the largest error, float64 `[R, N]`, of a group's product in eight bits.

    Of rows and the weight of their expert, before they are quantised; `unit` is that of a sum
    inside a block, and `dtype` the type of the product.
    """
    chosen = format_of(recipe)
    _, row_scales = quantize_rows(rows_RK, recipe, element)
    _, weight_scales = quantize_weight(weight_KN[None], recipe)
    width, columns = weight_KN.shape
    of_rows = scales_of_rows(row_scales, chosen, width).double()
    of_weight = scales_of_weight(weight_scales[0], chosen, width, columns).double()
    a, b = rows_RK.double().abs(), weight_KN.double().abs()
    most = (a + _error(a, of_rows, ELEMENTS[element])) @ (
        b + _error(b, of_weight, weight_element(chosen))
    )
    summed = (BLOCK * unit + (width + 3) * IN_FLOAT32) * most
    found = most - a @ b + summed + blocks_along(width, chosen.row_block) * TINY
    half_unit = torch.finfo(dtype).eps / 2
    return found + half_unit * (most + found) + torch.finfo(dtype).smallest_normal * half_unit


def _error(values: torch.Tensor, scales: torch.Tensor, element: Element) -> torch.Tensor:
    """Return the largest error of quantised magnitudes, from their scales."""
    largest = torch.maximum(element.half_unit * values, element.half_step * scales)
    cut = values - element.largest * scales
    return torch.maximum(largest, cut) + ROUNDINGS * values
