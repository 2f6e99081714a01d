"""Hand rows on, and their gradient to something else as well.

Contract
    `gradient_beside(rows, beside)` is `rows`; the gradient it is given goes to both. `beside` has
    the form of `rows`, and its values are read by nothing.

So a product by slices, `y_c = x_c @ w.detach()`, gives its slice of the gradient of `y` to the
product of all rows at once, `x.detach() @ w`, whose backward is then the weight's gradient, a sum
over all rows in their order. Nothing of that product is left in the forward pass but its rows.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_compile.ops.permute import LIBRARY

LIBRARY.define("gradient_beside(Tensor rows, Tensor beside) -> Tensor")


class _GradientBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, beside: Any) -> Any:
        del ctx, beside
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        del ctx
        return grads[0], grads[0]


def _gradient_beside(rows: torch.Tensor, beside: torch.Tensor) -> Any:
    return _GradientBeside.apply(rows, beside)


LIBRARY.impl("gradient_beside", _gradient_beside, "CompositeImplicitAutograd")
GRADIENT_BESIDE = torch.ops.megamoe.gradient_beside.default
