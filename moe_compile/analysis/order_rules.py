"""Sorts of labels and spreads of counts: where the orders of rows come from.

Contract
    A stable sort of labels orders runs of rows exactly. An unstable one leaves the rows of one
    label in an order of their own, equal to no other.
"""

from __future__ import annotations

import itertools

from moe_compile.analysis.operator_call import Call
from moe_compile.analysis.regions import Refusal
from moe_compile.analysis.row_domain import (
    Formulas,
    Labels,
    Opaque,
    Outside,
    Permutation,
    Rows,
    Segment,
    Unproven,
    Value,
    length,
)


def sort(call: Call) -> list[Value]:
    """Return the values and the indices of a sort along the only dimension."""
    key = call.value(call.inputs[0])
    if isinstance(key, Rows):
        raise Unproven(Refusal.ROWS_MIXED, call.name)
    descending = bool(call.argument("descending", False))
    if isinstance(key, Labels):
        return list(_sort_labels(key, bool(call.argument("stable", False)), descending))
    if isinstance(key, Permutation) and not descending:
        return [Opaque(is_arange=True), Permutation(key.target, key.source)]
    if call.inputs[0].dim() != 1:
        return [Opaque(reads_outside=True), Opaque(reads_outside=True)]
    tainted = isinstance(key, Outside) or (isinstance(key, Opaque) and key.reads_outside)
    undone = isinstance(key, Opaque) and key.is_permutation and not descending
    inverse = key if undone and isinstance(key, Opaque) else None
    order = Opaque(is_permutation=True, inverse_of=inverse, reads_outside=tainted)
    return [Opaque(reads_outside=tainted), order]


def _sort_labels(key: Labels, stable: bool, descending: bool) -> tuple[Labels, Permutation]:
    pairs = list(zip(key.values, key.order, strict=True))
    pairs.sort(key=lambda pair: pair[0], reverse=descending)
    if not stable:
        pairs = _shuffled(pairs)
    target = tuple(segment for _, segment in pairs)
    return Labels(target, tuple(label for label, _ in pairs)), Permutation(key.order, target)


def _shuffled(pairs: list[tuple[int, Segment]]) -> list[tuple[int, Segment]]:
    """Return one segment per label: an unstable sort leaves their order among each other open."""
    found = []
    this_sort = Opaque()
    for label, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        segments = tuple(segment for _, segment in group)
        experts = {segment.expert for segment in segments}
        expert = experts.pop() if len(experts) == 1 else None
        found.append((label, Segment((this_sort, label), length(segments), expert)))
    return found


def repeat_interleave(call: Call) -> Value | None:
    """Return the index of the count each row belongs to; rows follow the order of the counts."""
    repeats = call.value(call.inputs[0])
    if not isinstance(repeats, Formulas):
        return Opaque(reads_outside=isinstance(repeats, Outside))
    order: list[Segment] = []
    labels: list[int] = []
    for label, cell in enumerate(repeats.cells):
        runs = call.facts.runs(cell)
        if runs is None:
            return Opaque()
        order += runs
        labels += [label] * len(runs)
    return Labels(tuple(order), tuple(labels))
