"""Rows as they are sent, or packed into messages of eight bits; one exchange, and its gradient.

Contract
    A message has the format of `moe_compile.ops.wire_format`, row by row, so that moving rows and
    packing them commute, and messages may be passed on as they came.
    The exchange stays a collective that every scheduler sees: pack, `all_to_all_single` on bytes,
    wait, unpack.
    `dequantize_exchanged`: the gradient of the received rows goes back over the same group with the
    split lists swapped, as a message again or, where asked, unquantised.

Shapes: S rows to choose from, N rows sent, R rows received, D columns, M = row_bytes(D).
"""

from __future__ import annotations

from typing import Any

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
    """Return rows `index` of `came`, or all: the reverse of `as_sent`, of rows of `dtype`."""
    if quantizes:
        way = () if index is None else (index,)
        op = UNPACK_DEQUANTIZE if index is None else UNPACK_DEQUANTIZE_PERMUTE
        rows: torch.Tensor = op(came, *way, width, dtype)
        return rows
    return came if index is None else came.index_select(0, index)


def all_to_all(
    sent: torch.Tensor, output_splits: list[int], input_splits: list[int], group: str
) -> torch.Tensor:
    """Return the rows or message that an all-to-all of `sent`, made by `as_sent`, brings."""
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


LIBRARY = torch.library.Library("megamoe", "FRAGMENT")
LIBRARY.define(
    "dequantize_exchanged(Tensor received, Tensor sent, SymInt[] output_splits, "
    "SymInt[] input_splits, str group, bool quantize_gradient) -> Tensor"
)


class _DequantizeExchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        received: torch.Tensor,
        sent: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        group: str,
        quantize_gradient: bool,
    ) -> Any:
        ctx.back = (list(input_splits), list(output_splits), group)
        ctx.quantize_gradient = quantize_gradient
        return UNPACK_DEQUANTIZE(received, sent.shape[1], sent.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back = exchanged(grads[0], *ctx.back, quantizes=ctx.quantize_gradient)
        return None, back, None, None, None, None


def _dequantize_exchanged(*args: Any) -> Any:
    """Return rows `[R, D]` of the received message `[R, M]`.

    `sent`, `[N, D]`, is the tensor whose message was sent: its width, type and gradient. The
    split lists are those of the exchange, in rows.
    """
    return _DequantizeExchanged.apply(*args)


LIBRARY.impl("dequantize_exchanged", _dequantize_exchanged, "CompositeImplicitAutograd")
DEQUANTIZE_EXCHANGED = torch.ops.megamoe.dequantize_exchanged.default
