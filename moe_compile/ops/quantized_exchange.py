"""What an exchange brought, as rows again, with a backward pass that is the exchange reversed.

Contract
    The exchange itself stays a collective that every scheduler sees: pack, `all_to_all_single` on
    bytes, wait, unpack. Nothing here hides one.
    The gradient of the received rows goes back over the same group with the split lists swapped,
    as a message again or, where asked, unquantised.

Shapes: N rows sent, R rows received, D columns, M = row_bytes(D).
"""

from __future__ import annotations

from typing import Any

import torch

from moe_compile.ops.messages import exchanged
from moe_compile.ops.quantized_rows import UNPACK_DEQUANTIZE

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
