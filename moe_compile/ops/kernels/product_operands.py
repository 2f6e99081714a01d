"""Operands of products in eight bits: weights quantised, whole rows quantised, messages split.

Contract
    Values and layout are those of `moe_compile.ops.scaled_products`. A weight's payload runs along
    the columns of the rows that it multiplies: tensor cores sum eight bits along memory alone.
    Each kernel reads its input once and writes payload and scales once.

    quantize_squares     a weight, one scale to 128 x 128: one square per program
    quantize_whole       rows, one scale to each: one row per program
    split_messages       messages picked by an index become payload and scales, byte for byte
    zero_rows_behind     products of the rows that no group has

Maxima are taken over bit patterns, as in `pack_rows`, so that an infinity or NaN reaches its scale.

Worked example: message [0x7e, 0xf6, 0, 0, float32(1 / 448)] of width 2 becomes payload
[448.0, -224.0] and scale 1 / 448.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_compile.ops.kernels.pack_rows import (
    COLUMNS,
    MAGNITUDE,
    NUM_WARPS,
    TILE_BLOCKS,
    element_constants,
    load_message_blocks,
    locate_blocks,
)
from moe_compile.ops.product_formats import ELEMENTS, Element
from moe_compile.ops.wire_format import BLOCK, num_blocks, row_bytes

SIDE = tl.constexpr(BLOCK)
"""Of a square of a weight that shares a scale."""
SQUARE_WARPS = 16
"""32 of a square's elements to a thread."""
ZEROED_ROWS = tl.constexpr(32)
ZEROED_COLUMNS = tl.constexpr(128)
"""Of one program's tile, and of one store of it."""


@triton.jit
def quantize_squares_kernel(
    weight: tl.tensor,  # [E, WIDTH, NUM_COLUMNS], of any strides that are one along either
    payload: tl.tensor,  # [E, NUM_COLUMNS, WIDTH]
    scales: tl.tensor,  # [E, blocks of WIDTH, blocks of NUM_COLUMNS]
    WIDTH: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    OF_EXPERT: tl.constexpr,  # elements from an expert's weight to the next
    OF_ROW: tl.constexpr,
    OF_COLUMN: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_BITS: tl.constexpr,
    ELEMENT: tl.constexpr,
) -> None:
    """Quantise one square, read along memory and written column after column."""
    across, down = tl.cdiv(NUM_COLUMNS, SIDE), tl.cdiv(WIDTH, SIDE)
    expert = tl.program_id(0) // (down * across)
    square = tl.program_id(0) % (down * across)
    depth = (square // across) * SIDE + tl.arange(0, SIDE)
    column = (square % across) * SIDE + tl.arange(0, SIDE)
    of_expert = weight + expert.to(tl.int64) * OF_EXPERT
    if OF_ROW == 1:
        places = column[:, None] * OF_COLUMN + depth[None, :]
        inside = (column < NUM_COLUMNS)[:, None] & (depth < WIDTH)[None, :]
        x = tl.load(of_expert + places, mask=inside, other=0.0)
    else:
        places = depth[:, None] * OF_ROW + column[None, :]
        inside = (depth < WIDTH)[:, None] & (column < NUM_COLUMNS)[None, :]
        x = tl.trans(tl.load(of_expert + places, mask=inside, other=0.0))
    x = x.to(tl.float32)
    bits = tl.max(tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1), axis=0)
    largest = tl.maximum(bits, LEAST_BITS).to(tl.float32, bitcast=True)
    values = (x * tl.div_rn(LARGEST, largest)).to(ELEMENT).to(tl.uint8, bitcast=True)
    targets = payload + expert.to(tl.int64) * (WIDTH * NUM_COLUMNS)
    written = (column < NUM_COLUMNS)[:, None] & (depth < WIDTH)[None, :]
    tl.store(targets + column[:, None] * WIDTH + depth[None, :], values, mask=written)
    tl.store(scales + tl.program_id(0), tl.div_rn(largest, LARGEST))


def quantize_squares(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return payload `[E, K, N]`, column after column, and scales `[E, K / 128, N / 128]`.

    Shapes: weight `[E, K, N]` of bf16, fp16 or fp32, copied first unless rows or columns of it are
    contiguous.
    """
    experts, width, columns = weight.shape
    if 1 not in (weight.stride(1), weight.stride(2)):
        weight = weight.contiguous()
    element = ELEMENTS["e4m3"]
    payload = weight.new_empty((experts, columns, width), dtype=element.dtype)
    scales = weight.new_empty(
        (experts, num_blocks(width), num_blocks(columns)), dtype=torch.float32
    )
    if scales.numel():
        with torch.cuda.device_of(weight):
            quantize_squares_kernel[(scales.numel(),)](
                weight, payload.view(torch.uint8), scales, width, columns, *weight.stride(),
                *element_constants(element), num_warps=SQUARE_WARPS,
            )  # fmt: skip
    return payload.transpose(1, 2), scales


@triton.jit
def quantize_whole_kernel(
    rows: tl.tensor,  # [R, WIDTH]
    payload: tl.tensor,  # [R, WIDTH]
    scales: tl.tensor,  # [R]
    WIDTH: tl.constexpr,
    FILLED: tl.constexpr,  # WIDTH rounded up to a power of two
    LARGEST: tl.constexpr,
    LEAST_BITS: tl.constexpr,
    ELEMENT: tl.constexpr,
) -> None:
    """Quantise one row."""
    row, column = tl.program_id(0), tl.arange(0, FILLED)
    place = row.to(tl.int64) * WIDTH + column
    x = tl.load(rows + place, mask=column < WIDTH, other=0.0).to(tl.float32)
    bits = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, axis=0)
    largest = tl.maximum(bits, LEAST_BITS).to(tl.float32, bitcast=True)
    values = (x * tl.div_rn(LARGEST, largest)).to(ELEMENT).to(tl.uint8, bitcast=True)
    tl.store(payload + place, values, mask=column < WIDTH)
    tl.store(scales + row, tl.div_rn(largest, LARGEST))


def quantize_whole(rows: torch.Tensor, element: Element) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload `[R, D]` of rows and one scale for each, `[R]`.

    Shapes: rows `[R, D]` of bf16, fp16 or fp32, copied first where they are not contiguous.
    """
    num_rows, width = rows.shape
    payload = rows.new_empty(rows.shape, dtype=element.dtype)
    scales = rows.new_empty(num_rows, dtype=torch.float32)
    if num_rows:
        filled = triton.next_power_of_2(width)
        with torch.cuda.device_of(rows):
            quantize_whole_kernel[(num_rows,)](
                rows.contiguous(), payload.view(torch.uint8), scales, width, filled,
                *element_constants(element), num_warps=NUM_WARPS if filled <= 8192 else 16,
            )  # fmt: skip
    return payload, scales


@triton.jit(do_not_specialize=["num_rows", "num_sources"])
def split_messages_kernel(
    messages: tl.tensor,  # [M, MESSAGE] bytes
    index: tl.tensor,  # [num_rows], or None
    payload: tl.tensor,  # [num_rows, WIDTH] bytes
    scales: tl.tensor,  # [num_rows, BLOCKS]
    num_rows: tl.tensor,
    num_sources: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # per row
    MESSAGE: tl.constexpr,  # bytes of a message
) -> None:
    """Copy the blocks of one tile, and their scales."""
    row, source, block, column = locate_blocks(index, num_rows, num_sources, BLOCKS)
    came, scale = load_message_blocks(
        messages, num_sources, source, block, column, WIDTH, BLOCKS, MESSAGE
    )
    tl.store(scales + row * BLOCKS + block, scale)
    targets = payload + row[:, None] * WIDTH + column
    if BLOCKS * COLUMNS == WIDTH:
        tl.store(targets, came)
    else:
        tl.store(targets, came, mask=column < WIDTH)


def split_messages(
    messages: torch.Tensor, index: torch.Tensor | None, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return payload `[R, width]` and scales of messages `index[i]`, or of all.

    Shapes: messages `[M, row_bytes(width)]` of bytes, at an address that 4 divides; index `[R]` of
    integers from -M on, from M on those of rows of zeros. Either is copied first where it is not
    contiguous.
    """
    num_rows, blocks = messages.shape[0] if index is None else index.shape[0], num_blocks(width)
    payload = messages.new_empty((num_rows, width), dtype=torch.float8_e4m3fn)
    scales = messages.new_empty((num_rows, blocks), dtype=torch.float32)
    if payload.numel():
        grid = (triton.cdiv(num_rows * blocks, TILE_BLOCKS.value),)
        messages, index = messages.contiguous(), None if index is None else index.contiguous()
        with torch.cuda.device_of(messages):
            split_messages_kernel[grid](
                messages, index, payload.view(torch.uint8), scales, num_rows, messages.shape[0],
                width, blocks, row_bytes(width), num_warps=NUM_WARPS,
            )  # fmt: skip
    return payload, scales


@triton.jit(do_not_specialize=["num_rows"])
def zero_rows_behind_kernel(
    products: tl.tensor,  # [num_rows, NUM_COLUMNS]
    ends: tl.tensor,  # [NUM_GROUPS]
    num_rows: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
) -> None:
    """Write zeros into the rows of one tile that stand behind the last end."""
    end = tl.load(ends + NUM_GROUPS - 1)
    first = tl.program_id(0) * ZEROED_ROWS
    if first + ZEROED_ROWS <= end:
        return
    row = first + tl.arange(0, ZEROED_ROWS)
    targets = products + row.to(tl.int64)[:, None] * NUM_COLUMNS
    behind = (row >= end) & (row < num_rows)
    zeros = tl.zeros((ZEROED_ROWS, ZEROED_COLUMNS), products.dtype.element_ty)
    for start in range(0, NUM_COLUMNS, ZEROED_COLUMNS):
        column = start + tl.arange(0, ZEROED_COLUMNS)
        inside = behind[:, None] & (column < NUM_COLUMNS)[None, :]
        tl.store(targets + column[None, :], zeros, mask=inside)


def zero_rows_behind(products: torch.Tensor, ends: torch.Tensor) -> None:
    """Write zeros into the rows of `products` `[R, N]`, contiguous, from `ends[-1]` on."""
    if products.numel():
        with torch.cuda.device_of(products):
            zero_rows_behind_kernel[(triton.cdiv(products.shape[0], ZEROED_ROWS.value),)](
                products, ends.contiguous(), *products.shape, ends.shape[0], num_warps=NUM_WARPS
            )
