"""Rows picked by an index become messages in eight bits, and rows again: one read, one write.

Contract
    Every byte of every message is written, in the format of `moe_compile/ops/wire_format.py`.
    A block that holds an infinity or NaN unpacks to NaN.
    An unpacked row is float32(payload) * scale of its message, rounded once to the output's dtype.

A program takes TILE_BLOCKS consecutive blocks of its output, counted row after row. To pack:

    x        = 128 columns of row index[block // blocks_per_row]      as float32
    a        = max(|x|), but at least AMAX_MIN                        over bit patterns, as integers
    payload  = float8(x * (448 / a))
    scale    = a / 448

Bit patterns of nonnegative floats are ordered as their values are, infinity and NaN above all, so
the maximum keeps both without a comparison of floats. Work beyond the last row repeats blocks of
it: the same bytes are stored again, so the common case needs no mask.

Worked example: rows [[1.0, -0.5], [3.0, 0.0]], index [1] gives one block with a = 3.0; the payload
is 3.0 * (448 / 3.0) = 448.0 and 0.0, bytes [0x7e, 0x00]; two bytes of padding; then the scale
3.0 / 448 = 0.00669642... as float32. Message [0x7e, 0xf6, 0, 0, float32(1 / 448)] of width 2 is
448.0 and -224.0 times 1 / 448, so the row [1.0, -0.5].
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from moe_compile.ops.wire_format import (
    AMAX_MIN,
    BLOCK,
    E4M3_MAX,
    SCALE_BYTES,
    num_blocks,
    row_bytes,
)

TILE_BLOCKS = tl.constexpr(32)
"""Blocks per program: 128 threads hold 32 columns each, 64 bytes of bf16 on their way at once."""
NUM_WARPS = 4
COLUMNS = tl.constexpr(BLOCK)
SCALE_SIZE = tl.constexpr(SCALE_BYTES)


@triton.jit
def locate_blocks(
    index: tl.tensor,  # [num_rows], or None
    num_rows: tl.tensor,
    num_sources: tl.tensor,
    BLOCKS: tl.constexpr,  # per row
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return each block's row written and row read, its place in the row, and its columns.

    Blocks are counted row after row; beyond the last row they repeat blocks of that row. A
    negative index counts from the end.
    """
    start = tl.program_id(0).to(tl.int64) * TILE_BLOCKS
    position = (start % BLOCKS).to(tl.int32) + tl.arange(0, TILE_BLOCKS)
    row = tl.minimum(start // BLOCKS + position // BLOCKS, num_rows - 1)
    block = position % BLOCKS
    source = row
    if index is not None:
        source = tl.load(index + row).to(tl.int64)
        source = tl.where(source < 0, source + num_sources, source)
    return row, source, block, block[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


LARGEST = tl.constexpr(E4M3_MAX)
LEAST_BITS = tl.constexpr(struct.unpack("<i", struct.pack("<f", AMAX_MIN))[0])
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
"""All bits of a float32 but its sign."""


@triton.jit(do_not_specialize=["num_rows", "num_sources"])
def gather_quantize_pack_kernel(
    rows: tl.tensor,  # [S, WIDTH]
    index: tl.tensor,  # [num_rows], or None
    messages: tl.tensor,  # [num_rows, MESSAGE] bytes
    num_rows: tl.tensor,
    num_sources: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # per row
    MESSAGE: tl.constexpr,  # bytes of a message
) -> None:
    """Pack the blocks of one tile."""
    row, source, block, column = locate_blocks(index, num_rows, num_sources, BLOCKS)
    pointers = rows + source[:, None] * WIDTH + column
    if BLOCKS * COLUMNS == WIDTH:
        x = tl.load(pointers).to(tl.float32)
    else:
        x = tl.load(pointers, mask=column < WIDTH, other=0.0).to(tl.float32)

    bits = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1)
    largest = tl.maximum(bits, LEAST_BITS).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(LARGEST, largest)
    payload = (x * inverse[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)

    words = MESSAGE // SCALE_SIZE  # the last BLOCKS words of a message are its scales
    first_scale = words - BLOCKS
    targets = messages + row[:, None] * MESSAGE + column
    if BLOCKS * COLUMNS == WIDTH:
        tl.store(targets, payload)
    else:
        tl.store(targets, payload, mask=column < first_scale * SCALE_SIZE)
    scales = messages.to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(scales + row * words + (first_scale + block), tl.div_rn(largest, LARGEST))


def gather_quantize_pack(rows: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Return messages `[R, row_bytes(D)]` of bytes; message i is row `index[i]`, or row i.

    Shapes: rows `[S, D]` of bf16, fp16 or fp32; index `[R]` of integers in [-S, S). Either is
    copied first where it is not contiguous.
    """
    num_rows, width = rows.shape[0] if index is None else index.shape[0], rows.shape[1]
    message, blocks = row_bytes(width), num_blocks(width)
    messages = rows.new_empty((num_rows, message), dtype=torch.uint8)
    if messages.numel():
        grid = (triton.cdiv(num_rows * blocks, TILE_BLOCKS.value),)
        rows, index = rows.contiguous(), None if index is None else index.contiguous()
        with torch.cuda.device_of(rows):
            gather_quantize_pack_kernel[grid](
                rows,
                index,
                messages,
                num_rows,
                rows.shape[0],
                width,
                blocks,
                message,
                num_warps=NUM_WARPS,
            )
    return messages


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
