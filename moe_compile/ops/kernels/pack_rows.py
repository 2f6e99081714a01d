"""Rows picked by an index become messages in eight bits, and rows again: one read, one write.

Rows for a product are quantised alike, payload and scales apart.

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
from typing import Any

import torch
import triton
import triton.language as tl

from moe_compile.ops.product_formats import ELEMENTS, Element
from moe_compile.ops.wire_format import BLOCK, SCALE_BYTES, num_blocks, payload_bytes, row_bytes

TILE_BLOCKS = tl.constexpr(32)
"""Blocks per program: 128 threads hold 32 columns each, 64 bytes of bf16 on their way at once."""
NUM_WARPS = 4
COLUMNS = tl.constexpr(BLOCK)
SCALE_SIZE = tl.constexpr(SCALE_BYTES)
TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
"""Triton's names of the types of payloads."""


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


@triton.jit
def load_message_blocks(
    messages: tl.tensor,  # [num_sources, MESSAGE] bytes
    num_sources: tl.tensor,
    source: tl.tensor,
    block: tl.tensor,
    column: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # per row
    MESSAGE: tl.constexpr,  # bytes of a message
) -> tuple[tl.tensor, tl.tensor]:
    """Return the payload and the scale of blocks as `locate_blocks` has them.

    Blocks of messages from `num_sources` on are zeros.
    """
    words = MESSAGE // SCALE_SIZE  # the last BLOCKS words of a message are its scales
    scales = messages.to(tl.pointer_type(tl.float32), bitcast=True)
    is_there = source < num_sources
    place = scales + source * words + (words - BLOCKS + block)
    is_read = is_there[:, None]
    if BLOCKS * COLUMNS != WIDTH:
        is_read &= column < WIDTH
    pointers = messages + source[:, None] * MESSAGE + column
    return tl.load(pointers, mask=is_read, other=0), tl.load(place, mask=is_there, other=0.0)


MAGNITUDE = tl.constexpr(0x7FFFFFFF)
"""All bits of a float32 but its sign."""


@triton.jit(do_not_specialize=["num_rows", "num_sources"])
def gather_quantize_pack_kernel(
    rows: tl.tensor,  # [S, WIDTH]
    index: tl.tensor,  # [num_rows], or None
    payloads: tl.tensor,  # [num_rows, ROW] bytes
    scales: tl.tensor,  # [num_rows, ROW_OF_SCALES]
    num_rows: tl.tensor,
    num_sources: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # per row
    WRITTEN: tl.constexpr,  # bytes of a row of payloads that are written
    ROW: tl.constexpr,
    ROW_OF_SCALES: tl.constexpr,
    FIRST_SCALE: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_BITS: tl.constexpr,
    ELEMENT: tl.constexpr,
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
    payload = (x * inverse[:, None]).to(ELEMENT).to(tl.uint8, bitcast=True)

    targets = payloads + row[:, None] * ROW + column
    if BLOCKS * COLUMNS == WIDTH:
        tl.store(targets, payload)
    else:
        tl.store(targets, payload, mask=column < WRITTEN)
    tl.store(scales + row * ROW_OF_SCALES + (FIRST_SCALE + block), tl.div_rn(largest, LARGEST))


def element_constants(element: Element) -> tuple[float, int, Any]:
    """Return largest value, bits of the least maximum, and Triton's name of a payload's type."""
    (least,) = struct.unpack("<i", struct.pack("<f", element.least_maximum))
    return element.largest, least, TYPES[element.dtype]


def gather_quantize_pack(rows: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Return messages `[R, row_bytes(D)]` of bytes; message i is row `index[i]`, or row i.

    Shapes: rows `[S, D]` of bf16, fp16 or fp32; index `[R]` of integers in [-S, S). Either is
    copied first where it is not contiguous.
    """
    num_rows, width = rows.shape[0] if index is None else index.shape[0], rows.shape[1]
    messages = rows.new_empty((num_rows, row_bytes(width)), dtype=torch.uint8)
    _quantize(rows, index, messages, messages.view(torch.float32), payload_bytes(width))
    return messages


def quantize_blocks(rows: torch.Tensor, element: Element) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload `[R, D]` of rows, and scales `[R, D / 128]`, rounded up.

    Shapes: rows `[R, D]` of bf16, fp16 or fp32, copied first where they are not contiguous.
    """
    payload = rows.new_empty(rows.shape, dtype=element.dtype)
    scales = rows.new_empty((rows.shape[0], num_blocks(rows.shape[1])), dtype=torch.float32)
    _quantize(rows, None, payload.view(torch.uint8), scales, rows.shape[1], element)
    return payload, scales


def _quantize(
    rows: torch.Tensor,
    index: torch.Tensor | None,
    payloads: torch.Tensor,
    scales: torch.Tensor,
    written: int,
    element: Element = ELEMENTS["e4m3"],
) -> None:
    """Write `written` bytes of each row of `payloads`, and the last columns of `scales`."""
    num_rows, blocks = payloads.shape[0], num_blocks(rows.shape[1])
    if not payloads.numel():
        return
    grid = (triton.cdiv(num_rows * blocks, TILE_BLOCKS.value),)
    rows, index = rows.contiguous(), None if index is None else index.contiguous()
    with torch.cuda.device_of(rows):
        gather_quantize_pack_kernel[grid](
            rows, index, payloads, scales, num_rows, rows.shape[0], rows.shape[1], blocks, written,
            payloads.shape[1], scales.shape[1], scales.shape[1] - blocks,
            *element_constants(element), num_warps=NUM_WARPS,
        )  # fmt: skip


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
    payload, scale = load_message_blocks(
        messages, num_sources, source, block, column, WIDTH, BLOCKS, MESSAGE
    )
    targets = rows + row[:, None] * WIDTH + column
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
