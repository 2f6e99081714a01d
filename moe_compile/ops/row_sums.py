"""Sums of rows by place, weighted or not, and the sums per token that use them.

Contract
    Rows are added up in float32, where rows or weights are float64 in float64, from the first place
    on, and rounded to the type of the sum once. A sum of one row without a weight is that row, bit
    for bit. Rows may stand in several matrices, as they came, and are numbered through.

    sum_of_places      sums of the rows at some places
    dots_of_places     dot products of the rows at some places with a row for each line of places
    token_sums         sums per token of rows in any order, `slots` to a token

With `weights` s and `order` o, by which row r is slot o[r] % k of token o[r] // k:

    token_sums         y[t] = sum over j of s[t, j] rows[r] where o[r] = k t + j
    gradient of rows   s[t, j] dy[t], in the order of the rows, rounded once: no sum
    gradient of s      dot product of rows[r] and dy[t]

Worked example: rows [a, b, c, d], order [2, 0, 3, 1], two slots: sums [b + d, a + c].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_compile.ops.permute import LIBRARY
from moe_compile.ops.quantized_rows import HAS_KERNELS

if HAS_KERNELS:  # a torch without CUDA has no use for triton, and starts faster without it
    from moe_compile.ops.kernels.sum_rows import dot_rows, sum_rows

LIBRARY.define(
    "sum_of_places(Tensor[] rows, Tensor places, ScalarType dtype, Tensor? weights=None) -> Tensor"
)
LIBRARY.define(
    "dots_of_places(Tensor[] rows, Tensor places, Tensor others, ScalarType dtype) -> Tensor"
)
LIBRARY.define(
    "token_sums(Tensor[] rows, Tensor order, Tensor? weights, SymInt num_tokens, int slots, "
    "ScalarType dtype) -> Tensor"
)


def sum_of_places(
    rows: Sequence[torch.Tensor],
    places: torch.Tensor,
    dtype: torch.dtype,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sums `[number, D]` of the `rows` `[R, D]` at `places` `[number, most]`.

    No place but -1 needs a row; with `weights` `[number, most]` every place has one.
    """
    if weights is not None:
        return _weighted_sum(rows, places, dtype, weights)
    wide = wide_type(rows[0].dtype)
    there, at = (places >= 0).unbind(1), places.clamp(min=0).unbind(1)
    some = torch.cat([*rows, rows[0].new_zeros((1, rows[0].shape[1]))])  # so that there is a row
    total = torch.where(there[0][:, None], some.index_select(0, at[0]).to(wide), 0)
    for is_there, place in zip(there[1:], at[1:], strict=True):
        more = total + some.index_select(0, place).to(wide)
        total = torch.where(is_there[:, None], more, total)
    return total.to(dtype)


def _weighted_sum(
    rows: Sequence[torch.Tensor], places: torch.Tensor, dtype: torch.dtype, weights: torch.Tensor
) -> torch.Tensor:
    wide, whole = wide_type(rows[0].dtype, weights.dtype), joined(rows)
    total = None
    for place, weight in zip(places.unbind(1), weights.to(wide).unbind(1), strict=True):
        product = whole.index_select(0, place).to(wide) * weight[:, None]
        total = product if total is None else total + product
    assert total is not None
    return total.to(dtype)


def dots_of_places(
    rows: Sequence[torch.Tensor], places: torch.Tensor, others: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the products `[number, most]` of the rows at `places` and `others` `[number, D]`."""
    wide, whole = wide_type(rows[0].dtype, others.dtype), joined(rows)
    lines = others.to(wide)
    found = [(whole.index_select(0, place).to(wide) * lines).sum(1) for place in places.unbind(1)]
    return torch.stack(found, 1).to(dtype)


def joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all matrices."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def wide_type(*dtypes: torch.dtype) -> torch.dtype:
    """Return the type in which rows and weights of some types are added up."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


class _TokenSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, order: Any, weights: Any, num_tokens: Any, slots: int, dtype: Any, *rows: Any
    ) -> Any:
        counted = torch.arange(order.shape[0], device=order.device)
        places = torch.empty_like(counted).scatter(0, order, counted).view(num_tokens, slots)
        ctx.save_for_backward(order, places, weights, *rows)
        by_slot = None if weights is None else weights.reshape(num_tokens, slots)
        return SUM_OF_PLACES(rows, places, dtype, by_slot)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        order, places, weights, *rows = ctx.saved_tensors
        (grad,), slots = grads, places.shape[1]
        of_weights = None
        if weights is not None and ctx.needs_input_grad[1]:
            of_weights = DOTS_OF_PLACES(rows, places, grad, weights.dtype).reshape(weights.shape)
        of_rows = []
        for one, at in zip(rows, order.split([one.shape[0] for one in rows]), strict=True):
            gathered = grad.index_select(0, at // slots)
            if weights is not None:
                wide = wide_type(one.dtype, weights.dtype)
                gathered = gathered.to(wide) * weights.reshape(-1)[at].to(wide)[:, None]
            of_rows.append(gathered.to(one.dtype))
        return None, of_weights, None, None, None, *of_rows


def _token_sums(
    rows: list[Any], order: Any, weights: Any, num_tokens: Any, slots: int, dtype: Any
) -> Any:
    """Return the sums `[num_tokens, D]`, of type `dtype`, of `rows` `[R, D]`.

    `order` `[R]` is a permutation, `weights` has R elements, one token after another.
    """
    num_rows = order.shape[0]
    came = sum(one.shape[0] for one in rows)
    torch._check(
        came == num_rows, lambda: f"the number of rows to sum must be {num_rows}; got {came}"
    )
    torch._check(num_rows == num_tokens * slots)
    return _TokenSums.apply(order.long(), weights, num_tokens, slots, dtype, *rows)


def _fake_sum(
    rows: Sequence[torch.Tensor],
    places: torch.Tensor,
    dtype: torch.dtype,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    del weights
    return rows[0].new_empty((places.shape[0], rows[0].shape[1]), dtype=dtype)


def _fake_dots(
    rows: Sequence[torch.Tensor], places: torch.Tensor, others: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    del rows, others
    return places.new_empty(places.shape, dtype=dtype)


LIBRARY.impl("sum_of_places", sum_of_places, "CompositeExplicitAutograd")
LIBRARY.impl("dots_of_places", dots_of_places, "CompositeExplicitAutograd")
LIBRARY.impl("token_sums", _token_sums, "CompositeImplicitAutograd")
torch.library.register_fake("megamoe::sum_of_places", _fake_sum, lib=LIBRARY)
torch.library.register_fake("megamoe::dots_of_places", _fake_dots, lib=LIBRARY)
if HAS_KERNELS:
    LIBRARY.impl("sum_of_places", lambda *given: sum_rows(*given), "CUDA")
    LIBRARY.impl("dots_of_places", lambda *given: dot_rows(*given), "CUDA")
SUM_OF_PLACES = torch.ops.megamoe.sum_of_places.default
DOTS_OF_PLACES = torch.ops.megamoe.dots_of_places.default
TOKEN_SUMS = torch.ops.megamoe.token_sums.default
