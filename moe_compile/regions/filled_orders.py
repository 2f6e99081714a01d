"""Orders of tensors filled part by part: the rows at each place after a write or a sum.

Contract
    A part that was written holds the source; all other parts keep their contents.
    No row is added to memory that nothing filled: its values are undefined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sympy

from moe_compile.regions.row_domain import (
    UNFILLED,
    Fixed,
    Order,
    Rows,
    RunPositions,
    Value,
    cut,
    is_padding,
    join,
    padding,
)


def order_along(value: Value, dim: int, size: sympy.Expr) -> Order | None:
    """Return the order along `dim`, of `size` rows; None where it is no order of rows."""
    if isinstance(value, Rows) and value.dim == dim:
        return value.order
    if isinstance(value, Fixed) and value.is_uniform:
        return (padding(size, unfilled=value.is_uninitialised),)
    return None


def pieces_of(order: Order, sizes: Sequence[sympy.Expr]) -> list[Order] | None:
    """Return `order` in pieces of `sizes` rows; None where they do not fit or are not all."""
    pieces = cut(order, sizes)
    return None if pieces is None or pieces.pop() else pieces


def at_places(order: Order, places: RunPositions) -> Order | None:
    """Return the rows at `places` of `order`; None where the places do not fit it."""
    pieces = pieces_of(order, [segment.length for segment in places.source])
    return None if pieces is None else join(pieces[i] for i in places.kept)


def order_after_write(
    order: Order, places: RunPositions, source: Order, *, adds: bool = False
) -> Order | None:
    """Return `order` with `source` written at `places`, or added; None where not followed."""
    pieces = pieces_of(order, [segment.length for segment in places.source])
    given = pieces_of(source, [segment.length for segment in places.target])
    if pieces is None or given is None:
        return None
    for place, piece in zip(places.kept, given, strict=True):
        together = order_where_both_stand(pieces[place], piece) if adds else piece
        if together is None:
            return None
        pieces[place] = together
    return join(pieces)


def order_after_write_between(
    order: Order, start: sympy.Expr, size: sympy.Expr, source: Order
) -> Order | None:
    """Return `order` with `source` written over `size` rows from `start` on."""
    pieces = cut(order, [start, size])
    if pieces is None or pieces_of(source, [size]) is None:
        return None
    head, _, tail = pieces
    return join([head, source, tail])


def order_where_all_stand(orders: Iterable[Order]) -> Order | None:
    """Return the order that `order_where_both_stand` gives for several orders."""
    together: Order | None = None
    for order in orders:
        together = order if together is None else order_where_both_stand(together, order)
        if together is None:
            return None
    return together


def order_where_both_stand(left: Order, right: Order) -> Order | None:
    """Return the order of an elementwise result of two tensors: constants meet any row.

    None where a row would meet another row, or memory that nothing filled.
    """
    if left == right:
        return left
    if all(map(is_padding, left)):
        left, right = right, left
    pieces = pieces_of(right, [segment.length for segment in left])
    if pieces is None:
        return None
    found = []
    for segment, piece in zip(left, pieces, strict=True):
        rows = [other for other in ((segment,), piece) if not all(map(is_padding, other))]
        unfilled = any(part.rows == UNFILLED for part in (segment, *piece))
        if len({*rows}) > 1 or (rows and unfilled):
            return None
        constant = (padding(segment.length, unfilled=unfilled),)
        found.append(rows[0] if rows else constant)
    return join(found)
