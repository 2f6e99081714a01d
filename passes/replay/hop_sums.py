"""Emit the way home of rows that came in two hops: summed on the node, then at home.

Contract
    A token's rows cross from a node as one, in the type of its sum or, as rows inside the node, in
    eight bits. Orders and types are those of
    `moe_compile.ops.hop_sums`; each collective is a node of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D, tensor_of
from moe_compile.ops.hop_rows import BACK_ROWS
from moe_compile.ops.hop_sums import PLACES_OF
from moe_compile.ops.row_sums import SUM_OF_PLACES, wide_type
from moe_compile.regions.token_regions import DividedForm
from passes.replay.hops import Hops, Table, launched, total_of
from passes.replay.row_wire import RowWire, as_rows, as_sent
from passes.replay.sizes import extent


@dataclass(frozen=True, slots=True)
class WayHome:
    """The integers of the way home."""

    back: list[fx.Node]
    """Rows of each chunk in the order in which they came."""
    on_node: list[fx.Node]
    """Places of each row of hop 1, of each slice, among those that come back to its place on the
    node."""
    at_home: fx.Node
    """Places of each token among those that come home."""


def emit_way_home(
    emit: Emitter, form: DividedForm, table: Table, hops: Hops, num_rows: list[fx.Node]
) -> WayHome:
    """Emit the integers of the way home."""
    region, nodes, k = form.region, form.nodes, form.found.rows_per_token
    assert k is not None
    most = min(k, nodes.num_local * region.num_local_experts)
    places = []
    for near, slot, got in zip(hops.near, hops.on_node, hops.sizes.far_got, strict=True):
        places.append(emit.call(PLACES_OF, near, slot, total_of(emit, got), most))
    num_tokens = extent(emit, form.found.tokens, 0)
    return WayHome(
        [emit.call(BACK_ROWS, *given) for given in zip(table.received, num_rows, strict=True)],
        places,
        emit.call(PLACES_OF, hops.far, hops.at_home, num_tokens, min(k, nodes.num_nodes)),
    )


def emit_sums(
    emit: Emitter, form: DividedForm, rows: list[fx.Node], home: WayHome, hops: Hops
) -> tuple[tuple[fx.Node, ...], fx.Node]:
    """Emit the sums per token of `rows`, of each chunk, added to what the model adds them to.

    Return the launches, and the sums in the type that the model's have, rounded to it once. A node
    adds up the rows of a slice once those of all chunks are there, by expert.
    """
    sums, nodes, sizes = form.found.sums, form.nodes, hops.sizes
    total, wire = tensor_of(sums.total), RowWire.of(form.combine_wire, sums.total)
    assert total is not None
    inside: list[list[fx.Node]] = []
    for chunk, (part, order) in enumerate(zip(rows, home.back, strict=True)):
        sent = as_sent(emit, part, order, wire)
        got = [of_slice[chunk] for of_slice in sizes.near_sent]
        splits = [of_slice[chunk] for of_slice in sizes.near_got]
        inside.append(launched(emit, sent, got, splits, nodes.node))
    across: list[fx.Node] = []
    for of_slice, places in enumerate(home.on_node):
        came = [emit.call(C10D.wait_tensor, launches[of_slice]) for launches in inside]
        rows_here = [as_rows(emit, one, None, wire) for one in came]
        sums_here = emit.call(SUM_OF_PLACES, rows_here, places, total.dtype)
        rows_of_nodes = as_sent(emit, sums_here, None, wire)
        got, splits = [sizes.far_sent[of_slice]], [sizes.far_got[of_slice]]
        across += launched(emit, rows_of_nodes, got, splits, nodes.cross)
    waits = [emit.call(C10D.wait_tensor, launch) for launch in across]
    rows_home = [as_rows(emit, one, None, wire) for one in waits]
    dtype = total.dtype if sums.base is None else wide_type(total.dtype)
    made = emit.call(SUM_OF_PLACES, rows_home, home.at_home, dtype)
    if sums.base is not None:
        made = emit.method("to", emit.method("add", made, sums.base), total.dtype)
    launches = (*(launch for of_chunk in inside for launch in of_chunk), *across)
    return launches, made
