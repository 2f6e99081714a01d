"""Quantized rows in plain PyTorch, straight from the format's description in ops/wire_format.py.

It is what the operators are compared with, and what Inductor is given to fuse for the same job.
Shapes: N rows, D columns, B blocks, P payload bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_compile.ops.wire_format import (
    AMAX_MIN,
    BLOCK,
    E4M3_MAX,
    SCALE_BYTES,
    num_blocks,
    payload_bytes,
)


def pack(rows_ND: torch.Tensor) -> torch.Tensor:
    """Return the messages of rows, `[N, row_bytes(D)]` uint8."""
    num_rows, width = rows_ND.shape
    blocks = num_blocks(width)
    columns = F.pad(rows_ND.float(), (0, blocks * BLOCK - width)).view(num_rows, blocks, BLOCK)
    largest = columns.abs().amax(-1, keepdim=True).clamp_min(AMAX_MIN)
    quantized = (columns * (E4M3_MAX / largest)).to(torch.float8_e4m3fn)
    payload = quantized.view(torch.uint8).view(num_rows, blocks * BLOCK)[:, :width]
    scales = (largest / E4M3_MAX).view(num_rows, blocks).view(torch.uint8)
    return torch.cat([F.pad(payload, (0, payload_bytes(width) - width)), scales], dim=1)


def unpack(message: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows of messages, `[N, D]`."""
    num_rows, blocks = message.shape[0], num_blocks(width)
    start = payload_bytes(width)
    payload = message[:, :width].contiguous().view(torch.float8_e4m3fn).float()
    scales = message[:, start : start + SCALE_BYTES * blocks].contiguous().view(torch.float32)
    of_column = scales[:, :, None].expand(num_rows, blocks, BLOCK).reshape(num_rows, blocks * BLOCK)
    return (payload * of_column[:, :width]).to(dtype)


def gather_pack(rows_ND: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the messages of `rows_ND[index]`."""
    return pack(rows_ND[index])


def unpack_permuted(
    message: torch.Tensor, index: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the rows of `message[index]`."""
    return unpack(message[index], width, dtype)


def gather(rows_ND: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return `rows_ND[index]`."""
    return rows_ND[index]
