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

So the error of a sum over K terms is at most

    sum_k [(|a| + e(a)) (|b| + e(b)) - |a| |b|]
    + (128 u + (K + 3) 2**-24) sum_k (|a| + e(a)) (|b| + e(b))
    + blocks * 2**-118 + half a unit of the result

2**-20 |a| is more than the four roundings of 448 / a, of the quotient's product, of the scale and
of its product. u is 2**-24 for sums in float32. Tensor cores of Hopper keep about 14 bits of a sum
(DeepSeek-V3, section 3.3.2): u = 2**-13. 2**-118 is more than the largest sum of a block, 128 * 448
* 57344, times half the least float32, by which a product of two scales may be off.

A gradient of a weight is such a sum over the rows of a group, of which 128 share a scale. Rows, or
gradients, that came in a message are rounded twice: a = x + d to begin with, with

    |d| <= c (1 + v) + v |x|,  c = max(h |x|, half_step * scale of the message) + 2**-20 |x|

and v = 2**-8, for the payload and for bfloat16; then a to a'. So

    |a' - x| <= |d| + e(|x| + |d|)
                of normal e4m3: |x| ((1 + 2**-4) (1 + 2**-8) (1 + 2**-4) - 1) = 0.133 |x|
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
from moe_compile.ops.weight_gradients import quantize_columns
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
    most_a = a + _error(a, of_rows, ELEMENTS[element])
    most_b = b + _error(b, of_weight, weight_element(chosen))
    blocks = blocks_along(width, chosen.row_block)
    return _of_sum(a @ b, most_a @ most_b, (width, blocks), unit, dtype)


def weight_gradient_error_bound(
    rows_RK: torch.Tensor,
    grads_RN: torch.Tensor,
    *,
    element: str = "e4m3",
    came: tuple[bool, bool] = (False, False),
    unit: float = IN_FLOAT32,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the largest error, float64 `[K, N]`, of a group's weight gradient in eight bits.

    Of rows and gradients before they are quantised, gradients to `element`. `came` says of each
    whether a message in eight bits brought them, unpacked to bfloat16: the bound then is to the
    product of what was packed. `unit` and `dtype` as above.
    """
    a, b = rows_RK.double().abs(), grads_RN.double().abs()
    most_a = _most_along_rows(rows_RK, "e4m3", came[0])
    most_b = _most_along_rows(grads_RN, element, came[1])
    terms = rows_RK.shape[0], blocks_along(rows_RK.shape[0], BLOCK)
    return _of_sum(a.t() @ b, most_a.t() @ most_b, terms, unit, dtype)


def _most_along_rows(values: torch.Tensor, element: str, came: bool) -> torch.Tensor:
    """Return the largest magnitudes, float64 `[R, K]`, that one group's rows are quantised to."""
    most = values.double().abs()
    if came:
        chosen = format_of("blockwise")
        _, scales = quantize_rows(values, "blockwise")
        of_message = scales_of_rows(scales, chosen, values.shape[1]).double()
        most = most + _error(most, of_message, ELEMENTS["e4m3"])
        half_unit = torch.finfo(torch.bfloat16).eps / 2
        most = most * (1 + half_unit) + torch.finfo(torch.bfloat16).smallest_normal * half_unit
    offs = torch.tensor([values.shape[0]], dtype=torch.int32)
    _, scales = quantize_columns(most.float(), offs, element)
    along_rows = scales.double().repeat_interleave(BLOCK, 0)[: values.shape[0]]
    return most + _error(most, along_rows * (1 + ROUNDINGS), ELEMENTS[element])


def _of_sum(
    exact: torch.Tensor,
    most: torch.Tensor,
    terms: tuple[int, int],
    unit: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the error of sums of `terms`, so many numbers in so many blocks.

    `exact` and `most` are the sums of magnitudes before and after factors are quantised.
    """
    summed = (BLOCK * unit + (terms[0] + 3) * IN_FLOAT32) * most
    found = most - exact + summed + terms[1] * TINY
    half_unit = torch.finfo(dtype).eps / 2
    return found + half_unit * (most + found) + torch.finfo(dtype).smallest_normal * half_unit


def _error(values: torch.Tensor, scales: torch.Tensor, element: Element) -> torch.Tensor:
    """Return the largest error of quantised magnitudes, from their scales."""
    largest = torch.maximum(element.half_unit * values, element.half_step * scales)
    cut = values - element.largest * scales
    return torch.maximum(largest, cut) + ROUNDINGS * values
