"""Emit the way home of rows that came in two hops: summed on the node, then at home.

Contract
    A token's rows cross from a node as one, in the type of its sum. Orders and types are those of
    `moe_compile.ops.hop_sums`; each collective is a node of its own.
"""

from __future__ import annotations

from typing import TypeAlias

import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D, tensor_of
from moe_compile.ops.hop_rows import BACK_ROWS
from moe_compile.ops.hop_sums import PLACES_OF, SUM_OF_PLACES
from moe_compile.regions.token_regions import DividedForm
from passes.replay.hops import Hops, Table, total_of
from passes.replay.sizes import extent

WayHome: TypeAlias = tuple[fx.Node, fx.Node, fx.Node]
"""Rows in the order in which they came, the places of each row of hop 1 among those that come back
to its place on the node, and of each token among those that come home."""


def emit_way_home(
    emit: Emitter, form: DividedForm, table: Table, hops: Hops, num_rows: fx.Node
) -> WayHome:
    """Emit the integers of the way home."""
    region, nodes, k = form.region, form.nodes, form.found.rows_per_token
    assert k is not None
    far, near, _ = hops.indices
    _, far_got, _, _ = hops.splits
    back = emit.call(BACK_ROWS, table.received, num_rows)
    on_node = min(k, nodes.num_local * region.num_local_experts)
    came = total_of(emit, far_got)
    num_tokens = extent(emit, form.found.tokens, 0)
    return (
        back,
        emit.call(PLACES_OF, near, came, on_node),
        emit.call(PLACES_OF, far, num_tokens, min(k, nodes.num_nodes)),
    )


def emit_sums(
    emit: Emitter, form: DividedForm, rows: fx.Node, home: WayHome, hops: Hops
) -> tuple[tuple[fx.Node, fx.Node], fx.Node]:
    """Emit the sums per token of `rows`, added to what the model adds them to.

    Return the launches, and the sums in the type that the model's have, rounded to it once.
    """
    sums, nodes = form.found.sums, form.nodes
    back, on_node, at_home = home
    far_sent, far_got, near_sent, near_got = hops.splits
    total = tensor_of(sums.total)
    assert total is not None
    rows = emit.method("index_select", rows, 0, back)
    inside = emit.call(C10D.all_to_all_single, rows, near_sent, near_got, nodes.node)
    wide = emit.call(SUM_OF_PLACES, emit.call(C10D.wait_tensor, inside), on_node)
    rows = emit.method("to", wide, total.dtype)
    across = emit.call(C10D.all_to_all_single, rows, far_sent, far_got, nodes.cross)
    wide = emit.call(SUM_OF_PLACES, emit.call(C10D.wait_tensor, across), at_home)
    if sums.base is not None:
        wide = emit.method("add", wide, sums.base)
    return (inside, across), emit.method("to", wide, total.dtype)
