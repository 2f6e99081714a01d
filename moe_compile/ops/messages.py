"""Rows as they are sent, or as messages of eight bits; one exchange of them.

Contract
    A message is that of `moe_compile.ops.wire_format`: of each row by itself, so that moving rows
    and packing them commute, and messages may be handed on as they came.
    Each collective stays one that every scheduler sees.

Shapes: S rows to choose from, R rows sent, D columns.
"""

from __future__ import annotations

import torch

from moe_compile.ops.quantized_rows import (
    GATHER_QUANTIZE_PACK,
    UNPACK_DEQUANTIZE,
    UNPACK_DEQUANTIZE_PERMUTE,
)

C10D = torch.ops._c10d_functional


def as_sent(rows: torch.Tensor, index: torch.Tensor | None, *, quantizes: bool) -> torch.Tensor:
    """Return rows `index` of `rows`, `[S, D]`, or all: themselves `[R, D]`, or their message."""
    if quantizes:
        message: torch.Tensor = GATHER_QUANTIZE_PACK(rows, index)
        return message
    return rows.contiguous() if index is None else rows.index_select(0, index)


def as_rows(
    came: torch.Tensor,
    index: torch.Tensor | None,
    width: int,
    dtype: torch.dtype,
    *,
    quantizes: bool,
) -> torch.Tensor:
    """Return rows `index` of what came, or all: the reverse of `as_sent`, of rows of `dtype`."""
    if quantizes:
        way = () if index is None else (index,)
        op = UNPACK_DEQUANTIZE if index is None else UNPACK_DEQUANTIZE_PERMUTE
        rows: torch.Tensor = op(came, *way, width, dtype)
        return rows
    return came if index is None else came.index_select(0, index)


def all_to_all(
    sent: torch.Tensor, output_splits: list[int], input_splits: list[int], group: str
) -> torch.Tensor:
    """Return what an all-to-all of `sent`, as `as_sent` has it, brings."""
    launch = C10D.all_to_all_single(sent, output_splits, input_splits, group)
    received: torch.Tensor = C10D.wait_tensor(launch)
    return received


def exchanged(
    rows: torch.Tensor,
    output_splits: list[int],
    input_splits: list[int],
    group: str,
    *,
    quantizes: bool,
) -> torch.Tensor:
    """Return the rows that an all-to-all of `rows`, in eight bits where asked, brings."""
    sent = as_sent(rows, None, quantizes=quantizes)
    came = all_to_all(sent, output_splits, input_splits, group)
    return as_rows(came, None, rows.shape[1], rows.dtype, quantizes=quantizes)
