"""Messages in eight bits, picked by an index, become rows again: one read, one write.

Contract
    Row i is float32(payload) * scale of message `index[i]`, rounded once to the output's dtype.

A program takes TILE_BLOCKS consecutive blocks of the output, counted row after row, as
`gather_quantize_pack` does; work beyond the last row repeats blocks of it.

Worked example: message [0x7e, 0xf6, 0, 0, float32(1 / 448)] of width 2 is 448.0 and -224.0 times
1 / 448, so the row [1.0, -0.5].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_compile.ops.kernels.block_tile import (
    COLUMNS,
    NUM_WARPS,
    SCALE_SIZE,
    TILE_BLOCKS,
    locate_blocks,
)
from moe_compile.ops.wire_format import num_blocks, row_bytes


@triton.jit(do_not_specialize=["num_rows", "num_sources"])
def unpack_dequantize_kernel(
    messages: tl.tensor,  # [M, MESSAGE] bytes
    index: tl.tensor,  # [num_rows], or None
    rows: tl.tensor,  # [num_rows, WIDTH]
    num_rows: tl.tensor,
    num_sources: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # per row
    MESSAGE: tl.constexpr,  # bytes of a message
) -> None:
    """Unpack the blocks of one tile."""
    row, source, block, column = locate_blocks(index, num_rows, num_sources, BLOCKS)

    words = MESSAGE // SCALE_SIZE  # the last BLOCKS words of a message are its scales
    first_scale = words - BLOCKS
    scales = messages.to(tl.pointer_type(tl.float32), bitcast=True)
    scale = tl.load(scales + source * words + (first_scale + block))

    pointers = messages + source[:, None] * MESSAGE + column
    targets = rows + row[:, None] * WIDTH + column
    if BLOCKS * COLUMNS == WIDTH:
        payload = tl.load(pointers)
    else:
        payload = tl.load(pointers, mask=column < WIDTH, other=0)
    value = payload.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
    if BLOCKS * COLUMNS == WIDTH:
        tl.store(targets, value.to(rows.dtype.element_ty))
    else:
        tl.store(targets, value.to(rows.dtype.element_ty), mask=column < WIDTH)


def unpack_dequantize(
    messages: torch.Tensor, index: torch.Tensor | None, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows `[R, width]` of `dtype`; row i is message `index[i]`, or message i.

    Shapes: messages `[M, row_bytes(width)]` of bytes, at an address that 4 divides; index `[R]` of
    integers in [-M, M). Either is copied first where it is not contiguous.
    """
    num_rows, blocks = messages.shape[0] if index is None else index.shape[0], num_blocks(width)
    rows = messages.new_empty((num_rows, width), dtype=dtype)
    if rows.numel():
        grid = (triton.cdiv(num_rows * blocks, TILE_BLOCKS.value),)
        messages, index = messages.contiguous(), None if index is None else index.contiguous()
        with torch.cuda.device_of(messages):
            unpack_dequantize_kernel[grid](
                messages, index, rows, num_rows, messages.shape[0], width, blocks, row_bytes(width),
                num_warps=NUM_WARPS,
            )  # fmt: skip
    return rows
