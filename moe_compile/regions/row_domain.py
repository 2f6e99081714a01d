"""The proof's values of tensors between dispatch and combine: their rows, order and origin.

Contract
    An order names rows exactly: two tensors of equal order hold the same row at each position.
    Segments stay whole: an order is never cut inside rows that must stay together.
    Of a tensor that is filled part by part, a part that was written holds the source; all other
    parts keep their contents. No row is added to memory that nothing filled: its values are
    undefined.

A received row belongs to one run: the rows one rank sent for one expert. An order is a tuple of
segments: runs, padding, or part of what an index computed from the counts selected.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
import torch.fx as fx


@dataclass(frozen=True, slots=True)
class Segment:
    """`length` rows that lie next to each other, from `start` on, of the rows called `rows`."""

    rows: Hashable
    length: sympy.Expr
    expert: int | None
    """The local expert of all its rows; None for padding, and where it must follow from sizes."""
    start: sympy.Expr = sympy.S.Zero


Order = tuple[Segment, ...]

PADDING, UNFILLED = "padding", "unfilled"
"""Names of padding in place of rows: constants, or memory that nothing filled."""


@dataclass(frozen=True, slots=True)
class Selected:
    """The rows that `index` gathered from rows in the order `parent`."""

    index: UnknownIndex
    parent: Order


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """A tensor that is the same for any counts: made of constants alone."""

    values: torch.Tensor | None = None
    """Its integers where they are known."""
    is_uniform: bool = False
    """Whether it has one value everywhere; only then may its length depend on the counts."""
    is_uninitialised: bool = False
    is_zero: bool = False
    """Whether it is zero everywhere."""


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor made of parameters and buffers outside the region."""

    nodes: frozenset[fx.Node]
    behind: int = 0
    """Number of entries along dim 0 that are constants, behind all others."""
    part: int | None = None
    """The entry along dim 0 that it was made of, if it was one alone."""
    is_given: bool = False
    """Whether it is an input of the region itself, not made of one."""


@dataclass(frozen=True, slots=True)
class Formulas:
    """Integers computed from the counts, one formula per element, in flat order."""

    cells: tuple[sympy.Expr, ...]


@dataclass(frozen=True, slots=True)
class Labels:
    """`[R]` integers from the counts, one value per segment of `order`: ids of experts, say."""

    order: Order
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Permutation:
    """`[R]` indices: gathering rows in order `source` by them gives rows in order `target`."""

    source: Order
    target: Order


@dataclass(frozen=True, slots=True)
class RunPositions:
    """`[R]` indices: places of the segments `kept` among rows in order `source`, one by one."""

    source: Order
    kept: tuple[int, ...]
    """Which segments of `source`, each once."""

    @property
    def target(self) -> Order:
        """The segments kept."""
        return tuple(self.source[i] for i in self.kept)


@dataclass(frozen=True, slots=True, eq=False)
class UnknownIndex:
    """Integers computed from the counts in a way not followed; equal only to themselves."""

    is_permutation: bool = False
    inverse_of: UnknownIndex | None = None
    """The index that this one sorts; it is the inverse only where that is a permutation."""
    is_arange: bool = False
    reads_outside: bool = False


@dataclass(frozen=True, slots=True)
class IndexPerColumn:
    """`[R, ...]`: every entry of row i is `index[i]`, as of `index[:, None].expand(-1, D)`."""

    index: Permutation | RunPositions | UnknownIndex


@dataclass(frozen=True, slots=True, eq=False)
class GroupOfRow(UnknownIndex):
    """`[R]` integers: the group that each place is in; behind the last group, their number."""

    sizes: tuple[sympy.Expr, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class LabelTable(UnknownIndex):
    """Several labels for every row: along `dim` one entry of `values` for each segment."""

    order: Order = ()
    dim: int = 0
    values: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PerExpertTable:
    """`[R, ...]`: the entry of an outside table for the group of each place, entry e for group e.

    Places behind the last group hold constants.
    """

    nodes: frozenset[fx.Node]
    sizes: tuple[sympy.Expr, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Row i along `dim` depends on the i-th row of `order`, on no other row and no count."""

    dim: int
    order: Order


@dataclass(frozen=True, slots=True)
class OfExpert:
    """A tensor computed from rows of one local expert, singly or together, and from no others."""

    expert: int


Value = (
    Fixed
    | Outside
    | Formulas
    | Labels
    | Permutation
    | RunPositions
    | UnknownIndex
    | IndexPerColumn
    | PerExpertTable
    | Rows
    | OfExpert
)
FROM_COUNTS = (Formulas, Labels, Permutation, RunPositions, UnknownIndex, IndexPerColumn)


def reads_outside(value: Value) -> bool:
    """Whether the value was computed from tensors outside the region, beside the counts."""
    index = value.index if isinstance(value, IndexPerColumn) else value
    return isinstance(index, UnknownIndex) and index.reads_outside


def length(order: Order) -> sympy.Expr:
    """Return the number of rows of `order`."""
    return sympy.Add(*(segment.length for segment in order))


def padding(rows: sympy.Expr, *, unfilled: bool = False) -> Segment:
    """Return `rows` rows of padding."""
    return Segment(UNFILLED if unfilled else PADDING, rows, None)


def is_padding(segment: Segment) -> bool:
    """Whether the segment holds constants, or nothing yet, instead of rows."""
    return segment.rows in (PADDING, UNFILLED)


def is_selected(segment: Segment) -> bool:
    """Whether an index not followed chose the segment's rows."""
    return isinstance(segment.rows, Selected)


def join(orders: Iterable[Order]) -> Order:
    """Return the order of rows laid one after the other; neighbours that were cut grow together."""
    joined: list[Segment] = []
    for segment in (s for order in orders for s in order):
        last = joined[-1] if joined else None
        if last and last.rows == segment.rows and last.start + last.length == segment.start:
            joined[-1] = Segment(last.rows, last.length + segment.length, last.expert, last.start)
        elif segment.length != 0:
            joined.append(segment)
    return tuple(joined)


def cut(order: Order, sizes: Sequence[sympy.Expr]) -> list[Order] | None:
    """Return `order` in pieces of `sizes` rows, and a last piece with the rest.

    None where a cut would fall inside rows that must stay together.
    """
    pieces: list[Order] = []
    rest = order
    for size in sizes:
        taken = _take(rest, size)
        if taken is None:
            return None
        pieces.append(taken[0])
        rest = taken[1]
    return [*pieces, rest]


def _take(order: Order, size: sympy.Expr) -> tuple[Order, Order] | None:
    head: list[Segment] = []
    rest = list(order)
    while size != 0:
        if not rest:
            return None
        segment = rest.pop(0)
        if sympy.expand(size - segment.length).is_nonnegative:
            head.append(segment)
            size = size - segment.length
        elif is_padding(segment) and sympy.expand(segment.length - size).is_nonnegative:
            head.append(replace(segment, length=size))
            rest.insert(0, replace(segment, length=segment.length - size))
            size = sympy.S.Zero
        elif is_selected(segment) and not rest:
            middle = segment.start + size
            head.append(Segment(segment.rows, size, None, segment.start))
            rest = [Segment(segment.rows, segment.length - size, None, middle)]
            size = sympy.S.Zero
        else:
            return None
    return tuple(head), tuple(rest)


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
