"""Grouped products in eight bits: rows and weights are quantised, multiplied, and scaled.

Contract
    Each operator has a reference: plain PyTorch that dequantises and multiplies in float32.
    quantize_rows, quantize_weight and message_rows equal it bit for bit, whatever NaN a NaN is.
    scaled_grouped_mm adds up in another order.
    Group e is rows offs[e - 1] to offs[e], as in `torch._grouped_mm`; groups may be empty. Rows
    from offs[-1] on are never read, and their products are zero, or where neither factor is
    quantised what torch leaves there. On a GPU no size is read on the host.
    A message feeds the product as it came: no row of it is ever dequantised in memory.
    Results are new memory: payloads of rows row after row, those of a weight `[E, K, N]` column
    after column, scales as their shape says. Only `grouped_mm_fp8` has a gradient.

Shapes: R rows, K columns in, N columns out, E experts, M = row_bytes(K); `recipe` is a name of
`product_formats.FORMATS`, `element` one of `product_formats.ELEMENTS`.

    recipe      scales of rows    scales of a weight
    rowwise     [R]               [E, N]
    blockwise   [R, K / 128]      [E, K / 128, N / 128], rounded up
    mxfp8       [R, K / 32]       [E, K / 32, N]
    nvfp4       [R, K / 16 + 4]   [E, K / 16 + 4, N]
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from moe_compile.ops.product_formats import (
    ELEMENTS,
    ROW_AFTER_ROW,
    ProductFormat,
    blocks_along,
    element_of,
    format_of,
    format_on,
    numbers_of_rows,
    numbers_of_weight,
    quantized_rows,
    quantized_weight,
    scales_of_rows,
    scales_of_weight,
    weight_element,
)
from moe_compile.ops.quantized_rows import HAS_KERNELS, check_message, implement
from moe_compile.ops.weight_gradients import (
    QUANTIZE_COLUMNS,
    SCALED_WEIGHT_GRADIENT,
    UNQUANTIZED,
)
from moe_compile.ops.wire_format import num_blocks, payload_bytes

if HAS_KERNELS:  # a torch without CUDA has no use for triton, and starts faster without it
    from moe_compile.ops.kernels.grouped_product import grouped_product
    from moe_compile.ops.kernels.pack_rows import quantize_blocks
    from moe_compile.ops.kernels.product_operands import (
        quantize_squares,
        quantize_whole,
        split_messages,
        zero_rows_behind,
    )

LOG: Final = logging.getLogger(__name__)
LIBRARY = torch.library.Library("megamoe", "FRAGMENT")
LIBRARY.define('quantize_rows(Tensor rows, str recipe, str element="e4m3") -> (Tensor, Tensor)')
LIBRARY.define("quantize_weight(Tensor weight, str recipe) -> (Tensor, Tensor)")
LIBRARY.define(
    "dequantize_weight(Tensor payload, Tensor scales, str recipe, ScalarType dtype) -> Tensor"
)
LIBRARY.define(
    "scaled_grouped_mm(Tensor rows, Tensor row_scales, Tensor weight, Tensor weight_scales, "
    "Tensor offs, str recipe, ScalarType dtype) -> Tensor"
)
LIBRARY.define(
    "grouped_mm_fp8(Tensor rows, Tensor weight, Tensor offs, str recipe, str product, "
    "str grad_input, str grad_weight) -> Tensor"
)
LIBRARY.define("message_rows(Tensor message, Tensor? index, int width) -> (Tensor, Tensor)")

QUANTIZE_ROWS = torch.ops.megamoe.quantize_rows.default
QUANTIZE_WEIGHT = torch.ops.megamoe.quantize_weight.default
DEQUANTIZE_WEIGHT = torch.ops.megamoe.dequantize_weight.default
SCALED_GROUPED_MM = torch.ops.megamoe.scaled_grouped_mm.default
GROUPED_MM_FP8 = torch.ops.megamoe.grouped_mm_fp8.default
MESSAGE_ROWS = torch.ops.megamoe.message_rows.default

AS_IT_IS: Final = "bf16"
"""As an element type of `grouped_mm_fp8`: neither factor of that product is quantised."""


def quantize_rows(
    rows_RK: torch.Tensor, recipe: str, element: str = "e4m3"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload `[R, K]` of rows and their scales.

    Raises ValueError for rows that are no matrix of floating-point numbers, for a recipe that
    there is not, and for a type of elements that it has not.
    """
    _check_floating(rows_RK, "a matrix of rows", 2)
    chosen = format_of(recipe)
    return quantized_rows(rows_RK, chosen, element_of(chosen, element))


def quantize_weight(weight_EKN: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload `[E, K, N]`, in four bits `[E, K / 2, N]`, of a weight and its scales.

    The product with the transposed weight, for the gradient of rows, takes the weight transposed
    and quantised: its scales are those of its own columns, and its memory runs along them.
    """
    _check_floating(weight_EKN, "a weight", 3)
    return quantized_weight(weight_EKN, format_of(recipe))


def dequantize_weight(
    payload_EKN: torch.Tensor, scales: torch.Tensor, recipe: str, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight `[E, K, N]` that a payload and its scales stand for, rounded to `dtype`.

    Its memory is laid out as that of the payload. Warns once, since products in eight bits read
    the payload itself: whoever needs this weight has nothing of the payload.
    """
    _warn_of_unpacked()
    chosen = format_of(recipe)
    _, width, columns = payload_EKN.shape
    values = torch.empty_like(payload_EKN, dtype=dtype)
    for expert, (payload, of_expert) in enumerate(zip(payload_EKN, scales, strict=True)):
        by = scales_of_weight(of_expert, chosen, width, columns)
        values[expert] = numbers_of_weight(payload, chosen, width) * by
    return values


@functools.cache
def _warn_of_unpacked() -> None:
    LOG.warning(
        "weights that were gathered in eight bits are unpacked: a graph does not multiply them as "
        "they came. Its products have weights rounded to eight bits, and the report has the reason "
        "why they are not in eight bits themselves; without this reason nothing is wrong, only "
        'slow. To gather in sixteen bits write megamoe.expert_compute = "same"'
    )


def message_rows(
    message_SM: torch.Tensor, index_R: torch.Tensor | None, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return payload `[R, width]`, e4m3, and scales `[R, blocks]` of messages `index_R`, or of all.

    They are rows of recipe "blockwise". A negative index counts from the end; one of S or more is
    that of a row of zeros.
    """
    check_message(message_SM, width)
    message_RM = message_SM
    if index_R is not None:
        num, size = message_SM.shape
        place_R = torch.where(index_R < 0, index_R + num, index_R.clamp(max=num))
        message_RM = torch.cat([message_SM, message_SM.new_zeros((1, size))])[place_R]
    payload, scales = message_RM[:, :width], message_RM[:, payload_bytes(width) :]
    return (
        payload.clone(memory_format=ROW_AFTER_ROW).view(torch.float8_e4m3fn),
        scales.clone(memory_format=ROW_AFTER_ROW).view(torch.float32),
    )


def scaled_grouped_mm(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    offs: torch.Tensor,
    recipe: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the products `[R, N]` of rows `[R, K]` and the weight `[E, K, N]` of their group.

    `offs` int32 `[E]` has the ends of the groups. Raises ValueError where operands do not fit one
    another or the recipe.
    """
    chosen = check_product(rows, row_scales, weight, weight_scales, offs, recipe, dtype)
    products = row_scales.new_zeros((rows.shape[0], weight.shape[2]), dtype=dtype)
    width = rows.shape[1] * weight_element(chosen).per_byte
    start = 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            group = slice(start, end)
            by = scales_of_weight(weight_scales[expert], chosen, width, weight.shape[2])
            of_rows = scales_of_rows(row_scales[group], chosen, width)
            a = numbers_of_rows(rows[group], chosen, width) * of_rows
            b = numbers_of_weight(weight[expert], chosen, width) * by
            products[group] = (a @ b).to(dtype)
        start = end
    return products


def check_product(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    offs: torch.Tensor,
    recipe: str,
    dtype: torch.dtype,
) -> ProductFormat:
    """Return the format of a product. Raises ValueError where operands do not fit."""
    chosen = format_of(recipe)
    if rows.dim() != 2 or weight.dim() != 3 or rows.shape[1] != weight.shape[1]:
        raise ValueError(
            f"rows are [R, K] and weights [E, K, N], not {[*rows.shape]} and {[*weight.shape]}"
        )
    experts, width, columns = (int(size) for size in weight.shape)
    width *= weight_element(chosen).per_byte
    if offs.dtype is not torch.int32 or [*offs.shape] != [experts]:
        raise ValueError(f"offs are int32 [{experts}], not {offs.dtype} {[*offs.shape]}")
    if width % chosen.multiple or columns % chosen.multiple:
        raise ValueError(
            f"recipe {recipe!r} multiplies weights whose K and N {chosen.multiple} divides, not "
            f'{width} x {columns}; recipe "blockwise" multiplies any'
        )
    types = [ELEMENTS[name].dtype for name in chosen.elements]
    if rows.dtype not in types or weight.dtype is not types[0]:
        raise ValueError(
            f"recipe {recipe!r} multiplies rows of {types} and weights of {types[0]}, not "
            f"{rows.dtype} and {weight.dtype}"
        )
    if dtype not in chosen.results:
        raise ValueError(f"products of recipe {recipe!r} are {[*chosen.results]}, not {dtype}")
    _check_scales(row_scales, weight_scales, chosen, (experts, width, columns))
    torch._check(row_scales.shape[0] == rows.shape[0], lambda: "a row has no scale")
    return chosen


def _check_scales(
    row_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    chosen: ProductFormat,
    weight: tuple[int, int, int],
) -> None:
    of_row, of_weight = chosen.row_scales(weight[1]), chosen.weight_scales(*weight)
    found = [*row_scales.shape[1:]], [*weight_scales.shape]
    if found != (of_row, of_weight) or {row_scales.dtype, weight_scales.dtype} != {chosen.scale}:
        raise ValueError(
            f"scales of recipe {chosen.name!r} are {chosen.scale}, {['R', *of_row]} and "
            f"{of_weight}, not {row_scales.dtype} {[*row_scales.shape]} and "
            f"{weight_scales.dtype} {found[1]}"
        )


def _check_floating(values: torch.Tensor, what: str, dims: int) -> None:
    if values.dim() != dims or values.dtype not in UNQUANTIZED:
        raise ValueError(
            f"{what} to quantise must be a tensor of bfloat16, float16 or float32 with {dims} "
            f"dimensions; got {values.dtype} of shape {[*values.shape]}"
        )


class _GroupedProduct(torch.autograd.Function):
    """A product whose operands are quantised, and its gradients.

    The weight is saved, not its payload: a sharded weight may then be freed after the forward pass
    and gathered again, and is quantised once each time. So are rows: the gradient of the weight
    sums over them, along which their payload has no scales.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Any, weight: Any, offs: Any, recipe: str, product: str, *elements: str
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, offs)
        ctx.recipe, (ctx.grad_input, ctx.grad_weight) = recipe, elements
        return _product_of_rows(rows, weight, offs, recipe, product)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (rows, weight, offs), grad = ctx.saved_tensors, grads[0].contiguous()
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            back = weight.transpose(1, 2)
            of_rows = _product_of_rows(grad, back, offs, ctx.recipe, ctx.grad_input)
        if ctx.needs_input_grad[1]:
            if weight.stride(1) == 1:  # column after column, as torch's own gradient then is
                of_weight = _product_over_rows(grad, rows, offs, ctx.grad_weight, "e4m3")
                of_weight = of_weight.transpose(1, 2)
            else:
                of_weight = _product_over_rows(rows, grad, offs, "e4m3", ctx.grad_weight)
        return of_rows, of_weight, None, None, None, None, None


def _product_over_rows(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor, *elements: str
) -> torch.Tensor:
    """Return the sums `[E, K, N]` over rows of left `[R, K]` times right `[R, N]`, by group."""
    if AS_IT_IS in elements:
        return torch._grouped_mm(left.t(), right, offs=offs)
    operands = map(QUANTIZE_COLUMNS, (left, right), (offs, offs), elements)
    made: torch.Tensor = SCALED_WEIGHT_GRADIENT(*itertools.chain(*operands), offs, left.dtype)
    return made


def _product_of_rows(
    rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, recipe: str, element: str
) -> torch.Tensor:
    if element == AS_IT_IS:
        return torch._grouped_mm(rows, weight, offs=offs)
    payload, scales = QUANTIZE_ROWS(rows, recipe, element)
    product: torch.Tensor = SCALED_GROUPED_MM(
        payload, scales, *QUANTIZE_WEIGHT(weight, recipe), offs, recipe, rows.dtype
    )
    return product


def _grouped_mm_fp8(
    rows: Any,
    weight: Any,
    offs: Any,
    recipe: str,
    product: str,
    grad_input: str,
    grad_weight: str,
) -> torch.Tensor:
    """Return the products `[R, N]` of rows `[R, K]` and the weight `[E, K, N]` of their group.

    `product` is the element type to which rows are quantised; `grad_input` and `grad_weight` are
    those of gradients, in the products that make the gradients of rows and of the weight. With
    "bf16" neither factor of that product is quantised. Raises ValueError for a type that the recipe
    has not, and for `grad_weight` of another recipe than "blockwise".
    """
    elements = (product, grad_input, grad_weight)
    for element in elements:
        if element != AS_IT_IS:
            element_of(format_of(recipe), element)
    if grad_weight != AS_IT_IS and recipe != "blockwise":
        raise ValueError(f'recipe {recipe!r} has no scales along rows; write "blockwise"')
    made: torch.Tensor = _GroupedProduct.apply(rows, weight, offs, recipe, *elements)
    return made


def _fake_quantize_rows(
    rows: torch.Tensor, recipe: str, element: str = "e4m3"
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_floating(rows, "a matrix of rows", 2)
    chosen, width = format_of(recipe), int(rows.shape[1])
    of = element_of(chosen, element)
    payload = rows.new_empty((rows.shape[0], blocks_along(width, of.per_byte)), dtype=of.dtype)
    of_rows = (rows.shape[0], *chosen.row_scales(width))
    return payload, rows.new_empty(of_rows, dtype=chosen.scale)


def _fake_quantize_weight(weight: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    _check_floating(weight, "a weight", 3)
    experts, width, columns = (int(size) for size in weight.shape)
    chosen = format_of(recipe)
    of, of_weight = weight_element(chosen), chosen.weight_scales(experts, width, columns)
    across = (experts, columns, blocks_along(width, of.per_byte))
    payload = weight.new_empty(across, dtype=of.dtype)
    return payload.transpose(1, 2), weight.new_empty(of_weight, dtype=chosen.scale)


def _fake_dequantize_weight(
    payload: torch.Tensor, scales: torch.Tensor, recipe: str, dtype: torch.dtype
) -> torch.Tensor:
    del scales, recipe
    return torch.empty_like(payload, dtype=dtype)


def _fake_message_rows(
    message: torch.Tensor, index: torch.Tensor | None, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    check_message(message, width)
    num_rows = message.shape[0] if index is None else index.shape[0]
    payload = message.new_empty((num_rows, width), dtype=ELEMENTS["e4m3"].dtype)
    return payload, message.new_empty((num_rows, num_blocks(width)), dtype=torch.float32)


def _fake_product(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    offs: torch.Tensor,
    recipe: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    check_product(rows, row_scales, weight, weight_scales, offs, recipe, dtype)
    return rows.new_empty((rows.shape[0], weight.shape[2]), dtype=dtype)


def _rows_by_kernel(
    rows: torch.Tensor, recipe: str, element: str = "e4m3"
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_floating(rows, "a matrix of rows", 2)
    chosen = format_on(rows.device, recipe)
    by_kernel = quantize_whole if chosen.row_block is None else quantize_blocks
    return by_kernel(rows, element_of(chosen, element))


def _weight_by_kernel(weight: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    _check_floating(weight, "a weight", 3)
    if format_on(weight.device, recipe).row_block is not None:
        return quantize_squares(weight)
    experts, width, columns = weight.shape
    payload, scales = quantize_whole(
        weight.transpose(1, 2).reshape(experts * columns, width), ELEMENTS["e4m3"]
    )
    return payload.view(experts, columns, width).transpose(1, 2), scales.view(experts, columns)


def _message_by_kernel(
    message: torch.Tensor, index: torch.Tensor | None, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    check_message(message, width)
    return split_messages(message, index, width)


def _product_by_kernel(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    offs: torch.Tensor,
    recipe: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    check_product(rows, row_scales, weight, weight_scales, offs, recipe, dtype)
    if format_on(rows.device, recipe).row_block is not None:
        return grouped_product(rows, row_scales, weight, weight_scales, offs, dtype)
    if not rows.shape[0]:
        return rows.new_empty((0, weight.shape[2]), dtype=dtype)
    products: torch.Tensor = torch._scaled_grouped_mm(  # sums in float32, not in tensor cores alone
        rows, weight, row_scales, weight_scales, offs=offs, out_dtype=dtype, use_fast_accum=False
    )
    zero_rows_behind(products, offs)  # torch leaves what stood there
    return products


REFERENCES: Final[Mapping[Any, Callable[..., Any]]] = {
    QUANTIZE_ROWS: quantize_rows,
    QUANTIZE_WEIGHT: quantize_weight,
    DEQUANTIZE_WEIGHT: dequantize_weight,
    MESSAGE_ROWS: message_rows,
    SCALED_GROUPED_MM: scaled_grouped_mm,
}
"""Operator -> its reference in plain PyTorch."""

_FAKES: Final[Mapping[Any, Callable[..., Any]]] = {
    QUANTIZE_ROWS: _fake_quantize_rows,
    QUANTIZE_WEIGHT: _fake_quantize_weight,
    DEQUANTIZE_WEIGHT: _fake_dequantize_weight,
    MESSAGE_ROWS: _fake_message_rows,
    SCALED_GROUPED_MM: _fake_product,
}

_KERNELS: Final[Mapping[Any, Callable[..., Any]]] = {
    QUANTIZE_ROWS: _rows_by_kernel,
    QUANTIZE_WEIGHT: _weight_by_kernel,
    DEQUANTIZE_WEIGHT: dequantize_weight,
    MESSAGE_ROWS: _message_by_kernel,
    SCALED_GROUPED_MM: _product_by_kernel,
}

implement(LIBRARY, REFERENCES, _FAKES, _KERNELS)
LIBRARY.impl("grouped_mm_fp8", _grouped_mm_fp8, "CompositeImplicitAutograd")
