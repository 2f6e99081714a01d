"""Rows that came in two hops, with the gradient of one exchange; sums whose gradient hops.

Contract
    Values are given, and are those of the flat all-to-all; the operators only say how gradients
    travel. Each collective stays one that every scheduler sees, forward and backward.

    rows_received    the value of two hops; its gradient goes home flat, one row for each row sent
    summed_at_home   a sum per token of rows that came home flat; what the rows get of its gradient
                     is copies, which go out in two hops: a token crosses to a node once

Rows are in C chunks of experts, and hop 1 goes in S slices of tokens, as `ops/hop_rows.py` has it:
of each slice all chunks in hop 2. Sizes are those of `hop_sizes`, by slice and chunk.

Shapes: R rows of this rank's experts of a chunk, T tokens, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_compile.ops.messages import all_to_all, as_rows, as_sent, exchanged
from moe_compile.ops.permute import LIBRARY

LIBRARY.define(
    "rows_received(Tensor value, Tensor sent, SymInt[] output_splits, SymInt[] input_splits, "
    "str group, bool quantize_gradient) -> Tensor"
)
LIBRARY.define(
    "summed_at_home(Tensor total, Tensor[] rows, Tensor far, Tensor[] near, Tensor[] fan, "
    "SymInt[] far_sent, SymInt[] far_got, SymInt[] near_sent, SymInt[] near_got, "
    "str cross, str node, ScalarType? wire) -> Tensor"
)


def grouped(sizes: Sequence[Any], *shape: int) -> list[Any]:
    """Return a list of sizes as nested lists: of so many equal parts, each of these of so many."""
    if not shape:
        return list(sizes)
    length = len(sizes) // shape[0]
    return [grouped(sizes[i * length : (i + 1) * length], *shape[1:]) for i in range(shape[0])]


def cut(rows: torch.Tensor, splits: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the rows in pieces, each of the rows that one exchange sends by its splits."""
    if len(splits) == 1:
        return [rows]
    return list(torch.split(rows, [torch.sym_sum(sizes) for sizes in splits]))


def joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all pieces."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def spread(
    tokens: torch.Tensor,
    far: torch.Tensor,
    near: Sequence[torch.Tensor],
    fan: Sequence[torch.Tensor],
    far_sent: list[int],
    far_got: list[int],
    near_sent: list[int],
    near_got: list[int],
    cross: str,
    node: str,
    wire: torch.dtype | None,
) -> list[torch.Tensor]:
    """Return rows `[R, D]` of each chunk of tokens `[T, D]` of all ranks, by two hops.

    `far` etc. as `hop_rows`, `near` by slice, `fan` by chunk. Where there is a `wire`, they travel
    in eight bits, as rows of that type: packed once, and handed on as they came. The gradient is no
    business of this function.
    """
    slices, chunks = len(near), len(fan)
    to_nodes, from_nodes = grouped(far_sent, slices), grouped(far_got, slices)
    to_places, from_places = (grouped(sizes, slices, chunks) for sizes in (near_sent, near_got))
    quantizes, width = wire is not None, tokens.shape[1]
    sent = cut(as_sent(tokens.to(wire or tokens.dtype), far, quantizes=quantizes), to_nodes)
    hop_1 = zip(sent, from_nodes, to_nodes, strict=True)
    there = [all_to_all(rows, got, splits, cross) for rows, got, splits in hop_1]
    came: list[list[torch.Tensor]] = [[] for _ in fan]
    for of_slice, (rows, on) in enumerate(zip(there, near, strict=True)):
        pieces = cut(rows.index_select(0, on), to_places[of_slice])
        hop_2 = zip(pieces, from_places[of_slice], to_places[of_slice], strict=True)
        for chunk, (piece, got, splits) in enumerate(hop_2):
            came[chunk].append(all_to_all(piece, got, splits, node))
    row = width, wire or tokens.dtype
    brought = (
        as_rows(joined(rows), order, *row, quantizes=quantizes)
        for rows, order in zip(came, fan, strict=True)
    )
    return [rows.to(tokens.dtype) for rows in brought]


class _RowsReceived(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        sent: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        group: str,
        quantize_gradient: bool,
    ) -> Any:
        del sent  # whose gradient it is
        ctx.back = (list(input_splits), list(output_splits), group)
        ctx.quantize_gradient = quantize_gradient
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back = exchanged(grads[0], *ctx.back, quantizes=ctx.quantize_gradient)
        return None, back, None, None, None, None


class _SummedAtHome(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, total: torch.Tensor, far: Any, chunks: int, way: Any, *tensors: Any
    ) -> Any:
        ctx.save_for_backward(far, *tensors[chunks:])  # those before it get the gradient
        ctx.chunks, ctx.way = chunks, way
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradient,), (far, *orders) = grads, ctx.saved_tensors
        fan, near = orders[: ctx.chunks], orders[ctx.chunks :]
        rows = spread(gradient, far, near, fan, *ctx.way)
        return gradient, None, None, None, *rows, *(None for _ in orders)


def _rows_received(*args: Any) -> Any:
    """Return `value`, `[R, D]`, which equals what an all-to-all of `sent`, `[S, D]`, would bring.

    The split lists are those of that all-to-all; the gradient goes home in eight bits where asked.
    """
    return _RowsReceived.apply(*args)


def _summed_at_home(
    total: torch.Tensor, rows: list[Any], far: Any, near: list[Any], fan: list[Any], *way: Any
) -> Any:
    """Return `total`, `[T, D]`, the sums per token of `rows`, `[R, D]` of each chunk, sent home.

    Each row must count once, by the factor 1, in the sum of the token it is of; what else `total`
    is made of gets its gradient as without this. `way` is that of `spread`, from the sizes on.
    """
    return _SummedAtHome.apply(total, far, len(rows), way, *rows, *fan, *near)


LIBRARY.impl("rows_received", _rows_received, "CompositeImplicitAutograd")
LIBRARY.impl("summed_at_home", _summed_at_home, "CompositeImplicitAutograd")
ROWS_RECEIVED = torch.ops.megamoe.rows_received.default
SUMMED_AT_HOME = torch.ops.megamoe.summed_at_home.default
