"""Rules for gathers and scatters: the order of rows after them.

Contract
    An index whose every entry follows from runs of rows moves an order exactly.
    An index not followed is equal to itself only: a scatter by it undoes a gather by it, where
    no row can have been left out. That holds when the index is a permutation, when the rows left
    out would be uninitialised memory, which no working program reads, or when the index has as
    many entries as there are rows and chooses each once on sampled counts.
    Indexing operators have one form: a tensor read or written along one dimension by one vector.
    An operator of another form is not followed.
    An index as wide as the rows, `index[:, None].expand(-1, D)`, moves them as the vector does.

Reads and writes at the places of whole runs of rows, as a search for an expert finds them.
A run is read or written whole. Rows that were not written keep the value they had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from moe_compile.journal.reasons import Left, Reason
from moe_compile.proof.grouped_rules import entries
from moe_compile.proof.operator_call import Call, dim_of
from moe_compile.proof.order_rules import places_of
from moe_compile.regions.row_domain import (
    Fixed,
    GroupOfRow,
    IndexPerColumn,
    Labels,
    Order,
    Outside,
    Permutation,
    Rows,
    RunPositions,
    Segment,
    Selected,
    UnknownIndex,
    Value,
    at_places,
    is_padding,
    join,
    length,
    order_after_write,
    order_along,
    padding,
)

INDEX_TYPES: Final = (torch.int32, torch.int64)
MASKED: Final = ("index", "index_put", "_unsafe_index_put")
"""Operators that take a mask as the indices of its nonzero entries."""
ELEMENTWISE: Final = ("gather", "scatter", "scatter_add")
"""Operators whose index has an entry for every element."""
WRITES: Final = frozenset(
    {"index_put", "_unsafe_index_put", "index_copy", "index_add", "scatter", "scatter_add"}
)


@dataclass(frozen=True, slots=True)
class Indexing:
    """`base` read or written along `dim` by the vector `index`."""

    base: torch.Tensor
    dim: int
    index: torch.Tensor
    """`[R]`, or a tensor each row of which repeats one entry of such a vector."""
    source: torch.Tensor | None = None
    adds: bool = False
    wraps: bool = False
    """Whether a negative index counts from the end."""


def indexing(call: Call) -> Indexing | None:
    """Return the one-vector form of an indexing operator, or None when it has another form."""
    base = call.inputs[0]
    source = call.argument("values", call.argument("source", call.argument("src")))
    adds = bool(call.argument("accumulate", False)) or call.name in ("index_add", "scatter_add")
    if call.argument("indices") is not None and call.name != "embedding":
        given = list(call.argument("indices"))
        where = [i for i, index in enumerate(given) if index is not None]
        if len(where) != 1:
            return None
        dim, index = where[0], given[where[0]]
    else:
        index = call.argument("index", call.argument("indices"))
        dim = dim_of(call.argument("dim", 0), base.dim())
        if call.name in ELEMENTWISE and not _moves_rows(call, base, dim, index, source):
            return None
    is_mask = index.dtype is torch.bool and call.name in MASKED
    is_vector = index.dim() == 1 or call.name in ELEMENTWISE
    if not is_vector or not (is_mask or index.dtype in INDEX_TYPES):
        return None
    return Indexing(base, dim, index, source, adds, wraps=call.name in MASKED)


def index_of(call: Call, form: Indexing) -> Value:
    """Return the value of the vector by which rows are moved."""
    value = call.value(form.index)
    return value.index if isinstance(value, IndexPerColumn) and call.name in ELEMENTWISE else value


def _moves_rows(
    call: Call, base: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor | None
) -> bool:
    """Whether an operator with an index for each element moves whole rows along dim 0."""
    if base.dim() == 1:
        return index.dim() == 1
    of_rows = dim == 0 and isinstance(call.value(index), IndexPerColumn)
    given = [t for t in (index, source) if t is not None]
    alike = [call.shape(t)[1:] == call.shape(base)[1:] for t in given]
    return of_rows and index.dim() == base.dim() and all(alike)


def gather(call: Call) -> Value | list[Value] | None:
    """Return the result of reading by an index; None where the general rules apply."""
    form = indexing(call)
    if form is None:
        _refuse_mask(call)
        return None
    base, index = call.value(form.base), index_of(call, form)
    if (places := places_named(form, index)) is not None:
        return gather_places(call, form, base, places)
    if form.index.dtype is torch.bool:
        _refuse_mask(call)
        return None
    return _by_index(call, form, base, index)


def _by_index(call: Call, form: Indexing, base: Value, index: Value) -> Value | None:
    if isinstance(base, Rows):
        return _gather_rows(call, form, base, index)
    if isinstance(index, Labels):
        return _by_label(call, form, base, index)
    if isinstance(index, GroupOfRow) and (spread := entries(call, form.base, form.dim, index)):
        return spread
    if isinstance(base, Outside):
        per_row = call.facts.depends_on_counts(form.index.shape[0])
        reason = Reason.ROWS_FROM_OUTSIDE if per_row else Reason.VALUE_FROM_COUNTS
        raise Left(reason, call.name)
    if isinstance(base, Fixed) and base.is_uniform and not base.is_uninitialised:
        return Fixed(is_uniform=True, is_zero=base.is_zero)  # whichever entries are read
    if isinstance(index, Permutation):
        return _permuted(base, index)
    return None


def _refuse_mask(call: Call) -> None:
    masks = [t for t in call.inputs[1:] if t.dtype is torch.bool]
    if masks and isinstance(call.value(call.inputs[0]), Rows):
        raise Left(
            Reason.ROWS_OUT_OF_ORDER,
            "rows must be chosen by integers, and a boolean mask chooses them",
        )


def _of_another_order(call: Call) -> str:
    return (
        f"{call.name} indexes rows by indices that were computed for another order of these rows, "
        "from before a sort for example"
    )


def _permuted(base: Value, index: Permutation) -> Value | None:
    """Return labels, or indices, read in another order."""
    if isinstance(base, Permutation) and base.target == index.source:
        return Permutation(base.source, index.target)
    if isinstance(base, Labels) and base.order == index.source:
        of_segment = dict(zip(base.order, base.values, strict=True))
        once = len(of_segment) == len(base.order)  # a run that stands twice has labels of its own
        if once and all(segment in of_segment for segment in index.target):
            return Labels(index.target, tuple(of_segment[s] for s in index.target))
    return None


def _by_label(call: Call, form: Indexing, base: Value, index: Labels) -> Value | None:
    """Return a table read by label: a bias per expert, spread over the expert's rows."""
    if not isinstance(base, Outside | Fixed):
        return None
    slots = _slots(call, form, index)
    if isinstance(base, Fixed) and base.values is not None and base.values.dim() == 1:
        table = base.values.tolist()
        return Labels(index.order, tuple(int(table[slot]) for slot in slots))
    if isinstance(base, Outside):
        for segment, slot in zip(index.order, slots, strict=True):
            place = slot if form.dim == 0 else None
            call.note_read(base, place, (segment,))
    return Rows(form.dim, index.order)


def _slots(call: Call, form: Indexing, index: Labels) -> list[int]:
    """Return the entry of the table that each label reads: -1 and the last are the same."""
    size = form.base.shape[form.dim]
    if not isinstance(size, int):
        raise call.unknown()
    lowest = -size if form.wraps else 0
    if any(not lowest <= label < size for label in index.values):
        raise Left(Reason.UNKNOWN_OPERATOR, f"{call.name} reads beyond the end of a table")
    return [label % size for label in index.values]


def _gather_rows(call: Call, form: Indexing, rows: Rows, index: Value) -> Value:
    if form.dim != rows.dim:
        if isinstance(index, Fixed):
            return rows
        raise Left(Reason.VALUE_FROM_COUNTS, call.name)
    if isinstance(index, Permutation):
        if rows.order != index.source:
            raise Left(Reason.ROWS_MIXED, _of_another_order(call))
        return Rows(rows.dim, index.target)
    if not isinstance(index, UnknownIndex):
        raise Left(Reason.ROWS_MIXED, call.name)
    if index.reads_outside:
        raise Left(Reason.ROWS_FROM_OUTSIDE, call.name)
    return Rows(rows.dim, _select(call, form, rows.order, index))


def _select(call: Call, form: Indexing, order: Order, index: UnknownIndex) -> Order:
    total = call.shape(form.index)[0]
    if index.is_arange and total == length(order):
        return order
    if (inverse_of := index.inverse_of) is not None:
        undone = _undone(order, inverse_of) if length(order) == total else None
        if inverse_of.is_permutation:
            if undone is None:
                raise Left(Reason.ROWS_OUT_OF_ORDER, call.name)
            return undone
        # an index may choose padding twice or leave it out: sorting such an index undoes nothing
        if undone is not None and length(undone) == total == length(call.facts.root):
            call.facts.note_all_rows(Selected(inverse_of, undone), total)
            return undone
    if index.is_permutation and length(order) != total:
        raise Left(Reason.ROWS_MIXED, call.name)
    return (Segment(Selected(index, order), total, None),)


def _undone(order: Order, index: UnknownIndex) -> Order | None:
    """Return the order before a gather by all of `index`, if `order` is its result."""
    selected = order[0].rows if order else None
    if not isinstance(selected, Selected) or selected.index is not index:
        return None
    whole = len(order) == 1 and order[0].start == 0
    return selected.parent if whole else None


def scatter(call: Call) -> Value | list[Value] | None:
    """Return the result of writing rows by an index into a new tensor."""
    form = indexing(call)
    values = [call.value(t) for t in call.inputs]
    has_rows = any(isinstance(v, Rows) for v in values)
    if form is None or form.source is None:
        if has_rows:
            raise call.unknown()
        return None
    base, index = call.value(form.base), index_of(call, form)
    source = call.value(form.source)
    if not has_rows:
        return _inverse(call, form)
    return _scatter_rows(call, form, base, source, index)


def _scatter_rows(call: Call, form: Indexing, base: Value, source: Value, index: Value) -> Value:
    assert form.source is not None
    if (places := places_named(form, index)) is not None:
        return scatter_places(call, form, places)
    if not isinstance(base, Fixed) or not base.is_uniform or not isinstance(source, Rows):
        raise call.unknown()
    same_form = source.dim == form.dim and form.source.dim() == form.base.dim()
    if not same_form or (form.adds and base.is_uninitialised):
        raise call.unknown()
    return Rows(source.dim, _put_back(call, form, source.order, index, base))


def _inverse(call: Call, form: Indexing) -> Value | None:
    """Return the inverse of an index: `inverse[index] = arange(n)`, written over or into zeros."""
    assert form.source is not None
    base, index, source = (call.value(t) for t in (form.base, form.index, form.source))
    counts_up = isinstance(source, UnknownIndex) and source.is_arange and isinstance(base, Fixed)
    lengths = {call.shape(t)[0] for t in (form.base, form.index, form.source) if t.dim() == 1}
    if len(lengths) != 1 or form.base.dim() != 1 or form.source.dim() != 1:
        return None
    if form.adds and not (isinstance(base, Fixed) and base.is_zero):
        return None
    if form.base.dtype not in INDEX_TYPES or form.source.dtype not in INDEX_TYPES:
        return None
    if counts_up and isinstance(index, Permutation):
        return Permutation(index.target, index.source)
    if counts_up and isinstance(index, UnknownIndex) and not index.reads_outside:
        return UnknownIndex(is_permutation=index.is_permutation, inverse_of=index)
    return None


def _put_back(call: Call, form: Indexing, order: Order, index: Value, base: Fixed) -> Order:
    rows = call.shape(form.base)[form.dim]
    if isinstance(index, Permutation):
        behind = rows - length(index.source)
        if order != index.target or not behind.is_nonnegative:
            raise Left(Reason.ROWS_OUT_OF_ORDER, _of_another_order(call))
        return join([index.source, (padding(behind, unfilled=base.is_uninitialised),)])
    selected = order[0].rows if order else None
    if not isinstance(index, UnknownIndex) or not isinstance(selected, Selected):
        raise Left(Reason.ROWS_OUT_OF_ORDER, call.name)
    if selected.index is not index or order[0].start != 0 or length(selected.parent) != rows:
        raise Left(
            Reason.ROWS_OUT_OF_ORDER,
            f"{call.name} must write rows by the index that gathered them, and uses another index",
        )
    if length(order) != call.shape(form.index)[0]:
        raise Left(
            Reason.ROWS_OUT_OF_ORDER,
            f"{call.name} must write exactly the rows that were gathered, and writes others",
        )
    if index.is_permutation and len(order) == 1:
        return selected.parent
    padded = all(is_padding(s) for s in order[1:])
    rows_known = base.is_uninitialised or None not in call.facts.experts_of(length(order))
    may_add = not form.adds or (base.is_zero and len(order) == 1)
    if not may_add or not rows_known or not padded or index.is_permutation:
        raise Left(
            Reason.ROWS_OUT_OF_ORDER, f"{call.name} must write every row, and may leave some out"
        )
    call.facts.note_all_rows(selected, length(order))
    return selected.parent


def places_named(form: Indexing, index: Value) -> RunPositions | None:
    """Return the places that `index` names, as indices or as a mask; None of another index."""
    if form.index.dtype is torch.bool:
        return places_of(index) if isinstance(index, Labels) else None
    return index if isinstance(index, RunPositions) else None


def gather_places(call: Call, form: Indexing, base: Value, places: RunPositions) -> Value | None:
    """Return rows, labels, a constant or an index read at the places of some runs."""
    call.known.searches = True
    before = order_along(base, form.dim, call.shape(form.base)[form.dim])
    if before is not None:
        order = at_places(before, places)
        if order is None:
            raise Left(Reason.ROWS_MIXED, _of_another_order(call))
        return Rows(form.dim, order)
    if isinstance(base, Labels) and base.order == places.source:
        return Labels(places.target, tuple(base.values[i] for i in places.kept))
    if isinstance(base, Rows | Outside):
        reason = Reason.VALUE_FROM_COUNTS if isinstance(base, Rows) else Reason.ROWS_FROM_OUTSIDE
        raise Left(reason, call.name)
    return None


def scatter_places(call: Call, form: Indexing, places: RunPositions) -> Value:
    """Return the contents of `form.base` once its source was written or added at `places`."""
    assert form.source is not None
    call.known.searches = True
    if form.source.dim() != form.base.dim():
        raise call.unknown()
    base, source = (
        order_along(call.value(tensor), form.dim, call.shape(tensor)[form.dim])
        for tensor in (form.base, form.source)
    )
    if base is None or source is None:
        raise call.unknown()
    after = order_after_write(base, places, source, adds=form.adds)
    if after is None:
        raise Left(Reason.ROWS_MIXED, _of_another_order(call))
    return Rows(form.dim, after)
