"""Rows that came in two hops, and their sums per token, with the gradients of one exchange.

Contract
    Values are given, and are those of the flat all-to-all; the operators only decide how gradients
    travel. Each collective stays one that every scheduler sees, forward and backward.

    rows_received    the value of two hops; its gradient goes home flat, one row for each row sent
    summed_at_home   a sum per token of rows that came home flat; what the rows get of its gradient
                     is copies, which go out in two hops: a token crosses to a node once
    places_of        where the rows of each token are among those that came; `sum_of_places`
                     (ops/row_sums.py) adds them up
    tokens_received  tokens that came in two hops; what they get of the rows' gradients is summed

    Sums of rows that go home in two hops are made on the node first, then at home, in float32
    (float64 ones in float64), always in the same order: on a node by expert, at home by node. A sum
    of one row is that row, bit for bit. Places of sums are integers: no two rows are added to the
    same memory. Between nodes, the sum of a token's rows travels as one row, rounded to their type.

Rows are in C chunks of experts, and hop 1 goes in S slices of tokens, as `ops/hop_rows.py` has it:
of each slice all chunks in hop 2. Slices and chunks change no sum: a node adds up once the rows of
all chunks are there. Sizes are those of `hop_sizes`, by slice and chunk.

Worked example: rows [a, b, c] of tokens [1, 0, 1] in slots [0, 0, 1], at most two a token: places
[[1, -1], [0, 2]], sums [b, a + c].

Shapes: R rows of this rank's experts of a chunk, T tokens, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_compile.ops.packed_rows import all_to_all, as_rows, as_sent, exchanged
from moe_compile.ops.permute import LIBRARY
from moe_compile.ops.row_sums import SUM_OF_PLACES, joined

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
    """Return a list of sizes as nested lists of this shape, lists of equal length at each level."""
    if not shape:
        return list(sizes)
    length = len(sizes) // shape[0]
    return [grouped(sizes[i * length : (i + 1) * length], *shape[1:]) for i in range(shape[0])]


def cut(rows: torch.Tensor, splits: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the rows in pieces, one for the rows of each exchange."""
    if len(splits) == 1:
        return [rows]
    return list(torch.split(rows, [torch.sym_sum(sizes) for sizes in splits]))


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

    `far` etc. are those of `hop_rows`, `near` by slice, `fan` by chunk. With a `wire`, rows of that
    type travel in eight bits: packed once, and passed on as they came. This function leaves the
    gradient to its callers.
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
        del sent  # the gradient is that of `sent`
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

    Each row must count once, by the factor 1, in the sum of its token; other terms of `total` get
    their gradient as usual. `way` holds the arguments of `spread` from the sizes on.
    """
    return _SummedAtHome.apply(total, far, len(rows), way, *rows, *fan, *near)


LIBRARY.impl("rows_received", _rows_received, "CompositeImplicitAutograd")
LIBRARY.impl("summed_at_home", _summed_at_home, "CompositeImplicitAutograd")
ROWS_RECEIVED = torch.ops.megamoe.rows_received.default
SUMMED_AT_HOME = torch.ops.megamoe.summed_at_home.default


LIBRARY.define("places_of(Tensor index, Tensor slot, SymInt number, int most) -> Tensor")
LIBRARY.define(
    "tokens_received(Tensor[] value, Tensor tokens, Tensor[] back, Tensor[] on_node, "
    "Tensor at_home, SymInt[] far_sent, SymInt[] far_got, SymInt[] near_sent, SymInt[] near_got, "
    "str cross, str node, bool quantize_gradient) -> Tensor[]"
)


def places_of(index: torch.Tensor, slot: torch.Tensor, number: int, most: int) -> torch.Tensor:
    """Return the places of 0, ..., `number` - 1 in `index`, `[number, most]`, by `slot`.

    `slot` numbers the rows of equal index from 0 to `most` - 1, each once. -1 where a slot is
    empty.
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

    The other operands are those of `merged`, which sums the gradient of `tokens`.
    """
    return list(_TokensReceived.apply(tokens, at_home, len(value), way, *value, *back, *on_node))


LIBRARY.impl("places_of", places_of, "CompositeImplicitAutograd")
LIBRARY.impl("tokens_received", _tokens_received, "CompositeImplicitAutograd")
PLACES_OF = torch.ops.megamoe.places_of.default
TOKENS_RECEIVED = torch.ops.megamoe.tokens_received.default
