"""Rows to messages and back in plain PyTorch: the specification, and the CPU path.

Contract
    Bytes and values are those of `moe_compile.ops.wire_format`. Compilers fuse what is here: there
    is nothing but elementwise operators, one reduction per block, one concatenation, and where
    blocks do not fill a row another, or a choice of columns.

Shapes: S rows to choose from, R rows of a message, D columns, B blocks, M = row_bytes(D).
"""

from __future__ import annotations

import torch

from moe_compile.ops.wire_format import (
    AMAX_MIN,
    BLOCK,
    E4M3_MAX,
    SCALE_BYTES,
    num_blocks,
    payload_bytes,
    row_bytes,
)


def pack_rows(rows_SD: torch.Tensor, index_R: torch.Tensor | None) -> torch.Tensor:
    """Return the message `[R, M]`, uint8, of rows `index_R`, or of all where there is no index."""
    rows_RD = rows_SD if index_R is None else rows_SD[index_R]
    num_rows, width = rows_RD.shape
    filled = num_blocks(width) * BLOCK - width
    values_RD = rows_RD
    if filled:  # not by F.pad: of a sum of numbers that a host reads, it asks what it is
        values_RD = torch.cat([rows_RD, rows_RD.new_zeros((num_rows, filled))], dim=1)
    values_RB = values_RD.float().reshape(num_rows, num_blocks(width), BLOCK)
    amax_RB = values_RB.abs().amax(-1).clamp_min(AMAX_MIN)
    largest_RB = torch.full_like(amax_RB, E4M3_MAX)  # by a number, torch multiplies by 1 / amax
    payload = (values_RB * (largest_RB / amax_RB).unsqueeze(-1)).to(torch.float8_e4m3fn)
    payload_RD = payload.view(torch.uint8).reshape(num_rows, width + filled)
    scales = (amax_RB / largest_RB).reshape(-1).view(torch.uint8)
    scales_RM = scales.reshape(num_rows, SCALE_BYTES * num_blocks(width))
    return torch.cat([payload_RD[:, : payload_bytes(width)], scales_RM], dim=1)


def unpack_rows(message_RM: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows `[R, width]` of `dtype`."""
    payload_RD = message_RM[:, :width].view(torch.float8_e4m3fn).float()
    scales = message_RM[:, payload_bytes(width) :].reshape(-1).view(torch.float32)
    scales_RB = scales.reshape(message_RM.shape[0], num_blocks(width))
    if width % BLOCK:  # by an index: Inductor miscompiles slices of repeated or expanded columns
        block_D = torch.arange(width, device=message_RM.device) // BLOCK
        return (payload_RD * scales_RB[:, block_D]).to(dtype)
    blocked = payload_RD.reshape(-1, num_blocks(width), BLOCK) * scales_RB.unsqueeze(-1)
    return blocked.reshape(-1, width).to(dtype)


def check_message(message: torch.Tensor, width: int) -> None:
    """Raise ValueError unless `message` is a message of rows of `width` columns."""
    if message.dtype is not torch.uint8 or message.dim() != 2:
        raise ValueError(f"a message is [R, bytes] of uint8, not {message.dtype} {message.shape}")
    if message.shape[1] != row_bytes(width):
        raise ValueError(
            f"rows of {width} columns take {row_bytes(width)} bytes, not {message.shape[1]}"
        )
