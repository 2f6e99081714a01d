"""Sorts of labels, searches for them, spreads of counts: where the orders of rows come from.

Contract
    A stable sort of labels orders runs of rows exactly. An unstable one is refused: its order of
    one expert's rows may depend on how many rows others have, and so may the rounding of sums over
    them, such as gradients of weights. Where these may round differently, it is taken for a stable
    one, as the chunks' sorts then are.
"""

from __future__ import annotations

from moe_compile.graph.torch_calls import is_open_sort
from moe_compile.journal.reasons import Left, Reason
from moe_compile.proof.operator_call import Call
from moe_compile.proof.view_rules import slice_bounds
from moe_compile.regions.row_domain import (
    Formulas,
    IndexPerColumn,
    Labels,
    Order,
    Outside,
    Permutation,
    Rows,
    RunPositions,
    Segment,
    UnknownIndex,
    Value,
    cut,
    length,
    pieces_of,
)


def sort(call: Call) -> list[Value]:
    """Return the values and the indices of a sort along the only dimension."""
    key = call.value(call.inputs[0])
    if isinstance(key, Rows):
        raise Left(Reason.ROWS_MIXED, call.name)
    descending = bool(call.argument("descending", False))
    if call.is_sized_by_counts() and not _are_distinct(key):
        _check_stable(call)
    if isinstance(key, Labels) and call.inputs[0].dim() == 1:
        return list(_sort_labels(key, descending))
    if isinstance(key, Permutation) and not descending and call.inputs[0].dim() == 1:
        return [UnknownIndex(is_arange=True), Permutation(key.target, key.source)]
    if call.inputs[0].dim() != 1:
        return [UnknownIndex(reads_outside=True), UnknownIndex(reads_outside=True)]
    tainted = isinstance(key, Outside) or (isinstance(key, UnknownIndex) and key.reads_outside)
    inverse = key if isinstance(key, UnknownIndex) and not tainted and not descending else None
    order = UnknownIndex(is_permutation=True, inverse_of=inverse, reads_outside=tainted)
    return [UnknownIndex(reads_outside=tainted), order]


def _check_stable(call: Call) -> None:
    if call.node in call.known.made_stable:
        call.known.reordered[call.node] = None
    elif not call.argument("stable", False):
        allowed = (
            "megamoe.numerics = 'bounded' allows this change of order"
            if is_open_sort(call.node)
            else ""
        )
        raise Left(Reason.UNSTABLE_SORT, allowed or call.name)


def _are_distinct(key: Value) -> bool:
    """Whether no two elements are equal."""
    if isinstance(key, UnknownIndex):
        return key.is_permutation or key.is_arange
    return isinstance(key, Permutation)


def _sort_labels(key: Labels, descending: bool) -> tuple[Labels, Permutation]:
    pairs = sorted(
        zip(key.values, key.order, strict=True), key=lambda pair: pair[0], reverse=descending
    )
    target = tuple(segment for _, segment in pairs)
    return Labels(target, tuple(label for label, _ in pairs)), Permutation(key.order, target)


def repeat_interleave(call: Call) -> Value | None:
    """Return the index of the count each row belongs to; rows follow the order of the counts."""
    repeats = call.value(call.inputs[0])
    if not isinstance(repeats, Formulas):
        return UnknownIndex(reads_outside=isinstance(repeats, Outside))
    order: list[Segment] = []
    labels: list[int] = []
    for label, cell in enumerate(repeats.cells):
        runs = call.facts.runs(cell)
        if runs is None:
            return UnknownIndex()
        order += runs
        labels += [label] * len(runs)
    return Labels(tuple(order), tuple(labels))


def nonzero(call: Call) -> Value | None:
    """Return the places of labels that are not 0, in one column; None of anything else."""
    labels = call.value(call.inputs[0])
    if not isinstance(labels, Labels) or call.inputs[0].dim() != 1:
        return None
    return IndexPerColumn(places_of(labels))


def places_of(labels: Labels) -> RunPositions:
    """Return the places whose label is not 0."""
    return RunPositions(labels.order, tuple(i for i, value in enumerate(labels.values) if value))


def parts(call: Call) -> list[Value] | None:
    """Return the parts of a permutation, cut where runs of the rows it gathers end; else None."""
    value = call.value(call.inputs[0])
    is_arange = isinstance(value, UnknownIndex) and value.is_arange
    index = _of_rows_received(call) if is_arange else value
    if not isinstance(index, Permutation) or call.inputs[0].dim() != 1:
        return None
    pieces = _pieces(call, index.target)
    place = {segment: i for i, segment in enumerate(index.source)}
    if pieces is None or len(place) < len(index.source):
        return None
    if any(segment not in place for piece in pieces for segment in piece):
        return None
    return [RunPositions(index.source, tuple(place[segment] for segment in p)) for p in pieces]


def _of_rows_received(call: Call) -> Permutation | None:
    """Return `arange` as the places of the rows as received, if it is as long as these."""
    root = call.facts.root
    return Permutation(root, root) if call.shape(call.inputs[0]) == [length(root)] else None


def joined(call: Call) -> Value | None:
    """Return the permutation that a concatenation of all its parts gives; None of others."""
    places = [call.value(tensor) for tensor in call.inputs] if call.name == "cat" else []
    sources = {part.source for part in places if isinstance(part, RunPositions)}
    if len(sources) != 1 or not all(isinstance(part, RunPositions) for part in places):
        return None
    (source,) = sources
    kept = [i for part in places if isinstance(part, RunPositions) for i in part.kept]
    if sorted(kept) != [*range(len(source))]:
        return None
    return Permutation(source, tuple(source[i] for i in kept))


def _pieces(call: Call, order: Order) -> list[Order] | None:
    if call.name == "slice" and call.facts.formula(call.argument("step", 1)) == 1:
        start, end = slice_bounds(call, length(order))
        pieces = cut(order, [start, end - start])
        return None if pieces is None else pieces[1:2]
    sizes = call.argument("split_sizes")
    return pieces_of(order, [call.facts.formula(size) for size in sizes]) if sizes else None
