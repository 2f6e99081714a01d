"""Gradients of weights in eight bits: rows and gradients are quantised along rows, and multiplied.

Contract
    Each operator has a reference: plain PyTorch that dequantises and multiplies in float32.
    quantize_columns equals it bit for bit, whatever NaN a NaN is. scaled_weight_gradient adds up in
    another order.
    The gradient of a weight sums over the rows of a group, so that scales run along these: 128 rows
    of one column share one, counted from the group's first row (DeepSeek-V3, section 3.3.2). A
    block that a group does not fill has zeros behind. Blocks stand group after group; those behind
    the last are zeros, because the host knows only how many there are at most.
    Group e is rows offs[e - 1] to offs[e], as in `torch._grouped_mm`; the gradient of a group
    without rows is zero. Rows from offs[-1] on are never read.
    An infinity or NaN in a column reaches that row or column of its group's gradient, and no other.

Shapes: R rows, K columns in, N columns out, E experts, B = R // 128 + E blocks of rows. A payload
`[B, K, 128]` has the rows of a block along memory, which tensor cores sum; its scales are `[B, K]`.

Worked example: groups end at [130, 130, 140], of 150 rows: B = 150 // 128 + 3 = 4. Group 0 has
blocks 0 and 1, of 128 and 2 rows; group 1 none; group 2 block 2, of 10 rows; block 3 is zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from moe_compile.ops.product_formats import (
    ELEMENTS,
    FORMATS,
    ROW_AFTER_ROW,
    Element,
    blocks_along,
    element_of,
    format_on,
    quantized,
)
from moe_compile.ops.quantized_rows import HAS_KERNELS, implement
from moe_compile.ops.wire_format import BLOCK

if HAS_KERNELS:  # as in `scaled_products`
    from moe_compile.ops.kernels.weight_gradient import columns_by_block, weight_gradient

LIBRARY = torch.library.Library("megamoe", "FRAGMENT")
LIBRARY.define('quantize_columns(Tensor rows, Tensor offs, str element="e4m3") -> (Tensor, Tensor)')
LIBRARY.define(
    "scaled_weight_gradient(Tensor rows, Tensor row_scales, Tensor grads, Tensor grad_scales, "
    "Tensor offs, ScalarType dtype) -> Tensor"
)

QUANTIZE_COLUMNS = torch.ops.megamoe.quantize_columns.default
SCALED_WEIGHT_GRADIENT = torch.ops.megamoe.scaled_weight_gradient.default

BLOCKWISE: Final = FORMATS["blockwise"]
UNQUANTIZED: Final = (torch.bfloat16, torch.float16, torch.float32)
"""Types of rows and gradients that are quantised."""


def quantize_columns(
    rows_RK: torch.Tensor, offs_E: torch.Tensor, element: str = "e4m3"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload `[B, K, 128]` of rows in blocks, and scales `[B, K]`.

    Raises ValueError for rows that are no matrix of floating-point numbers, for offs that are not
    int32 `[E]`, and for a type of elements that recipe "blockwise" has not.
    """
    chosen = _check_rows(rows_RK, offs_E, element)
    blocks, width = _num_blocks(rows_RK, offs_E), rows_RK.shape[1]
    filled = torch.zeros((blocks, BLOCK, width), dtype=torch.float32, device=rows_RK.device)
    block = start = 0
    for end in offs_E.tolist():
        for first in range(start, end, BLOCK):
            last = min(first + BLOCK, end)
            filled[block, : last - first] = rows_RK[first:last]
            block += 1
        start = end
    payload, scales = quantized(filled, [1], chosen)
    turned = payload.transpose(1, 2).clone(memory_format=ROW_AFTER_ROW)
    return turned, scales.reshape(blocks, width)


def scaled_weight_gradient(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    grads: torch.Tensor,
    grad_scales: torch.Tensor,
    offs: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the gradients `[E, K, N]` of weights, from rows `[B, K, 128]` and `[B, N, 128]`.

    Raises ValueError where operands do not fit one another.
    """
    _check_operands(rows, row_scales, grads, grad_scales, offs, dtype)
    made = rows.new_zeros((offs.shape[0], rows.shape[1], grads.shape[1]), dtype=dtype)
    block = start = 0
    for expert, end in enumerate(offs.tolist()):
        mine = slice(block, block + blocks_along(end - start, BLOCK))
        if end > start:
            left = _in_a_row(rows[mine], row_scales[mine])
            made[expert] = (left @ _in_a_row(grads[mine], grad_scales[mine]).t()).to(dtype)
        block, start = mine.stop, end
    return made


def _in_a_row(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the dequantised columns `[K, rows]` of blocks."""
    return (payload.float() * scales[:, :, None]).transpose(0, 1).flatten(1)


def _num_blocks(rows: torch.Tensor, offs: torch.Tensor) -> Any:
    """Return the most blocks that groups of these rows have."""
    return rows.shape[0] // BLOCK + offs.shape[0]


def _check_rows(rows: torch.Tensor, offs: torch.Tensor, element: str) -> Element:
    if rows.dim() != 2 or rows.dtype not in UNQUANTIZED:
        raise ValueError(
            "rows to quantise must be a matrix of bfloat16, float16 or float32; got "
            f"{rows.dtype} of shape {[*rows.shape]}"
        )
    if offs.dtype is not torch.int32 or offs.dim() != 1:
        raise ValueError(f"offs must be int32 [E]; got {offs.dtype} of shape {[*offs.shape]}")
    return element_of(BLOCKWISE, element)


def _check_operands(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    grads: torch.Tensor,
    grad_scales: torch.Tensor,
    offs: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    types = [ELEMENTS[name].dtype for name in BLOCKWISE.elements]
    for payload, scales in ((rows, row_scales), (grads, grad_scales)):
        is_whole = payload.dim() == 3 and payload.shape[2] == BLOCK and payload.dtype in types
        if not is_whole or scales.dim() != 2 or scales.dtype is not torch.float32:
            raise ValueError(
                f"operands must be payloads [B, K, {BLOCK}] of {types} and float32 scales [B, "
                f"K]; got {payload.dtype} of shape {[*payload.shape]} and {scales.dtype} of "
                f"shape {[*scales.shape]}"
            )
        torch._check(
            scales.shape[0] == payload.shape[0],
            lambda: "each block must have scales, and one has none",
        )
        if scales.shape[1] != payload.shape[1]:
            raise ValueError(
                f"each of {payload.shape[1]} columns must have a scale; got "
                f"{scales.shape[1]} scales"
            )
    torch._check(
        rows.shape[0] == grads.shape[0],
        lambda: "rows and gradients must have equally many blocks, and have not",
    )
    if offs.dtype is not torch.int32 or offs.dim() != 1:
        raise ValueError(f"offs must be int32 [E]; got {offs.dtype} of shape {[*offs.shape]}")
    if dtype not in BLOCKWISE.results:
        raise ValueError(f"gradients of weights must be one of {[*BLOCKWISE.results]}; got {dtype}")


def _fake_columns(
    rows: torch.Tensor, offs: torch.Tensor, element: str = "e4m3"
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, blocks = _check_rows(rows, offs, element), _num_blocks(rows, offs)
    payload = rows.new_empty((blocks, rows.shape[1], BLOCK), dtype=chosen.dtype)
    return payload, rows.new_empty((blocks, rows.shape[1]), dtype=torch.float32)


def _fake_gradient(*operands: Any) -> torch.Tensor:
    _check_operands(*operands)
    rows, _, grads, _, offs, dtype = operands
    return rows.new_empty((offs.shape[0], rows.shape[1], grads.shape[1]), dtype=dtype)


def _columns_by_kernel(
    rows: torch.Tensor, offs: torch.Tensor, element: str = "e4m3"
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = _check_rows(rows, offs, element)
    format_on(rows.device, BLOCKWISE.name)
    return columns_by_block(rows, offs, chosen)


def _gradient_by_kernel(*operands: Any) -> torch.Tensor:
    _check_operands(*operands)
    format_on(operands[0].device, BLOCKWISE.name)
    return weight_gradient(*operands)


REFERENCES: Final[Mapping[Any, Callable[..., Any]]] = {
    QUANTIZE_COLUMNS: quantize_columns,
    SCALED_WEIGHT_GRADIENT: scaled_weight_gradient,
}
"""Operator -> its reference in plain PyTorch."""

_FAKES: Final[Mapping[Any, Callable[..., Any]]] = {
    QUANTIZE_COLUMNS: _fake_columns,
    SCALED_WEIGHT_GRADIENT: _fake_gradient,
}

_KERNELS: Final[Mapping[Any, Callable[..., Any]]] = {
    QUANTIZE_COLUMNS: _columns_by_kernel,
    SCALED_WEIGHT_GRADIENT: _gradient_by_kernel,
}

implement(LIBRARY, REFERENCES, _FAKES, _KERNELS)
