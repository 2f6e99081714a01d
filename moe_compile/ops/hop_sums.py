"""Sums per token of rows that go home in two hops: on the node first, then at home.

Contract
    Rows are added up in float32 (float64 ones in float64), always in the same order: on a node by
    expert, at home by node. A sum of one row is that row, bit for bit. Where sums are made is told
    by integers: no row is added to memory that another row is added to.
    From node to node a token's rows travel as one, rounded to their type.

    places_of          where the rows of each token are among those that came; `sum_of_places`
                       (ops/row_sums.py) adds them up
    tokens_received    tokens that came in two hops; what they get of the rows' gradients is summed

Chunks of experts and slices of tokens, as `ops/hop_rows.py` has them, change no sum: a node adds up
once the rows of all chunks are there.

Worked example: rows [a, b, c] of tokens [1, 0, 1] in slots [0, 0, 1], at most two a token: places
[[1, -1], [0, 2]], sums [b, a + c].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_compile.ops.messages import all_to_all, as_rows, as_sent
from moe_compile.ops.permute import LIBRARY
from moe_compile.ops.row_sums import SUM_OF_PLACES
from moe_compile.ops.two_hops import cut, grouped

LIBRARY.define("places_of(Tensor index, Tensor slot, SymInt number, int most) -> Tensor")
LIBRARY.define(
    "tokens_received(Tensor[] value, Tensor tokens, Tensor[] back, Tensor[] on_node, "
    "Tensor at_home, SymInt[] far_sent, SymInt[] far_got, SymInt[] near_sent, SymInt[] near_got, "
    "str cross, str node, bool quantize_gradient) -> Tensor[]"
)


def places_of(index: torch.Tensor, slot: torch.Tensor, number: int, most: int) -> torch.Tensor:
    """Return where each of 0, ..., `number` - 1 stands in `index`, `[number, most]`, by `slot`.

    `slot` says which of the rows of its number each is, of `most`; no two of them have the same.
    -1 where a slot is empty.
    """
    rows = torch.arange(index.shape[0], device=index.device)
    empty = torch.full((number, most), -1, device=index.device)
    return empty.index_put((index, slot), rows)


def merged(
    rows: Sequence[torch.Tensor],
    back: Sequence[torch.Tensor],
    on_node: Sequence[torch.Tensor],
    at_home: torch.Tensor,
    dtype: torch.dtype,
    far_sent: list[int],
    far_got: list[int],
    near_sent: list[int],
    near_got: list[int],
    cross: str,
    node: str,
    quantizes: bool,
) -> torch.Tensor:
    """Return the sums `[T, D]`, of type `dtype`, of rows `[R, D]` of each chunk and all ranks, by
    the two hops of `spread` reversed.

    `back` is `hop_rows.back_rows` of each chunk, `on_node` and `at_home` are the places of `near`
    of each slice and of `far`. Where asked, rows travel in eight bits, and the sums of nodes as
    well.
    """
    row = rows[0].shape[1], rows[0].dtype
    slices, chunks = len(on_node), len(back)
    to_nodes, from_nodes = grouped(far_got, slices), grouped(far_sent, slices)
    to_places, from_places = (grouped(sizes, slices, chunks) for sizes in (near_got, near_sent))
    there: list[list[torch.Tensor]] = [[] for _ in on_node]
    for chunk, (part, order) in enumerate(zip(rows, back, strict=True)):
        sent = [of_slice[chunk] for of_slice in to_places]
        pieces = cut(as_sent(part, order, quantizes=quantizes), sent)
        for of_slice, piece in enumerate(pieces):
            got = from_places[of_slice][chunk]
            there[of_slice].append(all_to_all(piece, got, sent[of_slice], node))
    home = []
    for of_slice, (came, places) in enumerate(zip(there, on_node, strict=True)):
        rows_here = [as_rows(one, None, *row, quantizes=quantizes) for one in came]
        sums = SUM_OF_PLACES(rows_here, places, rows[0].dtype)
        sent_sums = as_sent(sums, None, quantizes=quantizes)
        home.append(all_to_all(sent_sums, from_nodes[of_slice], to_nodes[of_slice], cross))
    rows_home = [as_rows(one, None, *row, quantizes=quantizes) for one in home]
    total: torch.Tensor = SUM_OF_PLACES(rows_home, at_home, dtype)
    return total


class _TokensReceived(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, at_home: torch.Tensor, chunks: int, way: Any, *tensors: Any
    ) -> Any:
        ctx.save_for_backward(at_home, *tensors[chunks:])
        ctx.way, ctx.dtype = way, tokens.dtype
        return tuple(value.clone() for value in tensors[:chunks])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        at_home, *orders = ctx.saved_tensors
        back, on_node = orders[: len(grads)], orders[len(grads) :]
        sums = merged(grads, back, on_node, at_home, ctx.dtype, *ctx.way)
        return sums, *(None,) * (3 + len(grads) + len(orders))


def _tokens_received(
    value: list[Any], tokens: Any, back: list[Any], on_node: list[Any], at_home: Any, *way: Any
) -> Any:
    """Return `value`, `[R, D]` of each chunk, rows of `tokens`, `[T, D]`, as two hops bring them.

    The other operands are those of `merged`, by which the gradient of `tokens` is summed.
    """
    return list(_TokensReceived.apply(tokens, at_home, len(value), way, *value, *back, *on_node))


LIBRARY.impl("places_of", places_of, "CompositeImplicitAutograd")
LIBRARY.impl("tokens_received", _tokens_received, "CompositeImplicitAutograd")
PLACES_OF = torch.ops.megamoe.places_of.default
TOKENS_RECEIVED = torch.ops.megamoe.tokens_received.default
