"""Rows that came in two hops, with the gradient of one exchange; sums whose gradient hops.

Contract
    Values are given, and are those of the flat all-to-all; the operators only say how gradients
    travel. Each collective stays one that every scheduler sees, forward and backward.

    rows_received    the value of two hops; its gradient goes home flat, one row for each row sent
    summed_at_home   a sum per token of rows that came home flat; what the rows get of its gradient
                     is copies, which go out in two hops: a token crosses to a node once

Shapes: R rows of this rank's experts, S rows it sent, T tokens, D columns.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_compile.ops.permute import LIBRARY

LIBRARY.define(
    "rows_received(Tensor value, Tensor sent, SymInt[] output_splits, SymInt[] input_splits, "
    "str group) -> Tensor"
)
LIBRARY.define(
    "summed_at_home(Tensor total, Tensor rows, Tensor far, Tensor near, Tensor fan, "
    "SymInt[] far_sent, SymInt[] far_got, SymInt[] near_sent, SymInt[] near_got, "
    "str cross, str node) -> Tensor"
)
C10D = torch.ops._c10d_functional


def exchanged(
    rows: torch.Tensor, output_splits: list[int], input_splits: list[int], group: str
) -> torch.Tensor:
    """Return what an all-to-all of `rows` brings."""
    launch = C10D.all_to_all_single(rows.contiguous(), output_splits, input_splits, group)
    received: torch.Tensor = C10D.wait_tensor(launch)
    return received


def spread(
    tokens: torch.Tensor,
    far: torch.Tensor,
    near: torch.Tensor,
    fan: torch.Tensor,
    far_sent: list[int],
    far_got: list[int],
    near_sent: list[int],
    near_got: list[int],
    cross: str,
    node: str,
) -> torch.Tensor:
    """Return rows `[R, D]` of tokens `[T, D]` of all ranks, by two hops; `far` etc. as `hop_rows`.

    The gradient is no business of this function.
    """
    there = exchanged(tokens.index_select(0, far), far_got, far_sent, cross)
    return exchanged(there.index_select(0, near), near_got, near_sent, node).index_select(0, fan)


class _RowsReceived(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        sent: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        group: str,
    ) -> Any:
        del sent  # whose gradient it is
        ctx.back = (list(input_splits), list(output_splits), group)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, exchanged(grads[0], *ctx.back), None, None, None


class _SummedAtHome(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, total: torch.Tensor, rows: torch.Tensor, far: Any, near: Any, fan: Any, *way: Any
    ) -> Any:
        del rows  # whose gradient it is
        ctx.save_for_backward(far, near, fan)
        ctx.way = way
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradient,) = grads
        rows = spread(gradient, *ctx.saved_tensors, *ctx.way)
        return gradient, rows, *(None,) * (3 + len(ctx.way))


def _rows_received(*args: Any) -> Any:
    """Return `value`, `[R, D]`, which equals what an all-to-all of `sent`, `[S, D]`, would bring.

    The split lists are those of that all-to-all.
    """
    return _RowsReceived.apply(*args)


def _summed_at_home(*args: Any) -> Any:
    """Return `total`, `[T, D]`, the sums per token of `rows`, `[R, D]`, sent home.

    Each row must count once, by the factor 1, in the sum of the token it is of; what else `total`
    is made of gets its gradient as without this.
    """
    return _SummedAtHome.apply(*args)


LIBRARY.impl("rows_received", _rows_received, "CompositeImplicitAutograd")
LIBRARY.impl("summed_at_home", _summed_at_home, "CompositeImplicitAutograd")
ROWS_RECEIVED = torch.ops.megamoe.rows_received.default
SUMMED_AT_HOME = torch.ops.megamoe.summed_at_home.default
