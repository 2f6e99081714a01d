"""Sums per token of rows that go home in two hops: on the node first, then at home.

Contract
    Rows are added up in float32 (float64 ones in float64), always in the same order: on a node by
    expert, at home by node. A sum of one row is that row, bit for bit. Where sums are made is told
    by integers: no row is added to memory that another row is added to.
    From node to node a token's rows travel as one, rounded to their type.

    places_of          where the rows of each token are among those that came
    sum_of_places      their sums
    tokens_received    tokens that came in two hops; what they get of the rows' gradients is summed

Worked example: rows [a, b, c] of tokens [1, 0, 1], at most two a token: places [[1, -1], [0, 2]],
sums [b, a + c].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from moe_compile.ops.permute import LIBRARY
from moe_compile.ops.two_hops import exchanged

LIBRARY.define("places_of(Tensor index, SymInt number, int most) -> Tensor")
LIBRARY.define("sum_of_places(Tensor rows, Tensor places) -> Tensor")
LIBRARY.define(
    "tokens_received(Tensor value, Tensor tokens, Tensor back, Tensor on_node, Tensor at_home, "
    "SymInt[] far_sent, SymInt[] far_got, SymInt[] near_sent, SymInt[] near_got, "
    "str cross, str node) -> Tensor"
)


def places_of(index: torch.Tensor, number: int, most: int) -> torch.Tensor:
    """Return where each of 0, ..., `number` - 1 stands in `index`, `[number, most]`, in order.

    -1 where it stands fewer times than `most`; none may stand there more often.
    """
    order = torch.argsort(index, stable=True)
    numbers, ordered = torch.arange(number, device=index.device), index[order]
    first = torch.searchsorted(ordered, numbers)
    times = torch.searchsorted(ordered, numbers, right=True) - first
    slots = torch.arange(most, device=index.device)
    places = F.pad(order, (0, most))[first[:, None] + slots]
    return torch.where(slots < times[:, None], places, -1)


def sum_of_places(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the sums `[number, D]` of the `rows` `[R, D]` at `places` `[number, most]`.

    In float32, of float64 rows in float64.
    """
    wide = torch.float64 if rows.dtype is torch.float64 else torch.float32
    first, *others = places.unbind(1)
    total = torch.where(first[:, None] >= 0, _taken(rows, first).to(wide), 0)
    for place in others:
        more = total + _taken(rows, place).to(wide)
        total = torch.where(place[:, None] >= 0, more, total)
    return total


def _taken(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return rows.index_select(0, place.clamp(min=0))


def merged(
    rows: torch.Tensor,
    back: torch.Tensor,
    on_node: torch.Tensor,
    at_home: torch.Tensor,
    far_sent: list[int],
    far_got: list[int],
    near_sent: list[int],
    near_got: list[int],
    cross: str,
    node: str,
) -> torch.Tensor:
    """Return the sums `[T, D]` of rows `[R, D]` of all ranks, by the two hops of `spread` reversed.

    `back` is `hop_rows.back_rows`, `on_node` and `at_home` are the places of `near` and `far`.
    Wide, as `sum_of_places`: whoever reads them rounds.
    """
    there = exchanged(rows.index_select(0, back), near_sent, near_got, node)
    sums = sum_of_places(there, on_node).to(rows.dtype)
    return sum_of_places(exchanged(sums, far_sent, far_got, cross), at_home)


class _TokensReceived(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        tokens: torch.Tensor,
        back: torch.Tensor,
        on_node: torch.Tensor,
        at_home: torch.Tensor,
        *way: Any,
    ) -> Any:
        ctx.save_for_backward(back, on_node, at_home)
        ctx.way, ctx.dtype = way, tokens.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sums = merged(grads[0], *ctx.saved_tensors, *ctx.way)
        return None, sums.to(ctx.dtype), *(None,) * (3 + len(ctx.way))


def _tokens_received(*args: Any) -> Any:
    """Return `value`, `[R, D]`, rows of `tokens`, `[T, D]`, as two hops bring them.

    The other operands are those of `merged`, by which the gradient of `tokens` is summed.
    """
    return _TokensReceived.apply(*args)


LIBRARY.impl("places_of", places_of, "CompositeImplicitAutograd")
LIBRARY.impl("sum_of_places", sum_of_places, "CompositeImplicitAutograd")
LIBRARY.impl("tokens_received", _tokens_received, "CompositeImplicitAutograd")
PLACES_OF = torch.ops.megamoe.places_of.default
SUM_OF_PLACES = torch.ops.megamoe.sum_of_places.default
TOKENS_RECEIVED = torch.ops.megamoe.tokens_received.default
