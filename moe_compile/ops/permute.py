"""Put rows in another order, with a backward pass that is one gather, not a scatter.

Contract
    `permute_rows(rows, order, inverse)` equals `rows[order]` bit for bit, and its gradient is
    `grad[inverse]`. `order` is a permutation of the rows and `inverse` its inverse.
"""

from __future__ import annotations

from typing import Any

import torch

LIBRARY = torch.library.Library("megamoe", "FRAGMENT")
LIBRARY.define("permute_rows(Tensor rows, Tensor order, Tensor inverse) -> Tensor")


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, order: Any, inverse: Any) -> Any:
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        order, inverse = ctx.saved_tensors
        return torch.ops.megamoe.permute_rows(grads[0], inverse, order), None, None


def _permute_rows(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> Any:
    """Return `rows[order]`. Shapes: rows `[R, ...]`, order and inverse `[R]` integers."""
    return _PermuteRows.apply(rows, order, inverse)


LIBRARY.impl("permute_rows", _permute_rows, "CompositeImplicitAutograd")
PERMUTE_ROWS = torch.ops.megamoe.permute_rows.default
