"""Reads and writes at the places of whole runs of rows, as a search for an expert finds them.

Contract
    A run is read or written whole. Where others were not written, nothing is said of them but what
    was known before.
"""

from __future__ import annotations

import torch

from moe_compile.journal.reasons import Reason
from moe_compile.proof.indexing import Indexing
from moe_compile.proof.operator_call import Call
from moe_compile.proof.order_rules import places_of
from moe_compile.regions.filled_orders import at_places, order_along, put
from moe_compile.regions.row_domain import (
    Labels,
    Outside,
    Places,
    Rows,
    Unproven,
    Value,
)


def places_named(form: Indexing, index: Value) -> Places | None:
    """Return the places that `index` names, as indices or as a mask; None of another index."""
    if form.index.dtype is torch.bool:
        return places_of(index) if isinstance(index, Labels) else None
    return index if isinstance(index, Places) else None


def gather(call: Call, form: Indexing, base: Value, places: Places) -> Value | None:
    """Return rows, labels, a constant or an index read at the places of some runs."""
    call.known.searches = True
    before = order_along(base, form.dim, call.shape(form.base)[form.dim])
    if before is not None:
        order = at_places(before, places)
        if order is None:
            raise Unproven(Reason.ROWS_MIXED, f"{call.name} by indices of another order")
        return Rows(form.dim, order)
    if isinstance(base, Labels) and base.order == places.source:
        return Labels(places.target, tuple(base.values[i] for i in places.kept))
    if isinstance(base, Rows | Outside):
        reason = Reason.VALUE_FROM_COUNTS if isinstance(base, Rows) else Reason.ROWS_FROM_OUTSIDE
        raise Unproven(reason, call.name)
    return None


def scatter(call: Call, form: Indexing, places: Places) -> Value:
    """Return what `form.base` holds once its source was written at `places`, or added there."""
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
    after = put(base, places, source, adds=form.adds)
    if after is None:
        raise Unproven(Reason.ROWS_MIXED, f"{call.name} by indices of another order")
    return Rows(form.dim, after)
