"""Emit the way of tokens to experts in two hops: the table of sizes, and both exchanges.

Contract
    Every index is computed on the device, as `moe_compile.ops.hop_rows` has it; of sizes the caller
    lets the host read what `moe_compile.ops.hop_rows.hop_sizes` says.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx

from moe_compile.cost.hop_shape import HopShape
from moe_compile.cost.sizes import note_nominal_rows
from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D, tensor_of
from moe_compile.ops.hop_rows import FAN_ROWS, FAR_ROWS, HOP_TABLE, NEAR_ROWS
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.token_regions import DividedForm

EVERY: Final = slice(None)


@dataclass(frozen=True, slots=True)
class Table:
    """What every rank told this one, and what it told of its own."""

    everyone: fx.Node
    """`[N, L, E + L + 1]`, as `moe_compile.ops.hop_rows` has it."""
    tokens: fx.Node
    """How many of this rank's tokens need each node, `[N]`."""
    received: fx.Node
    """Its part that says how many rows of each sender each expert of this rank gets, `[N, L, E]`"""


@dataclass(frozen=True, slots=True)
class Hops:
    """The way of tokens to this rank's experts, as operators take it."""

    indices: tuple[fx.Node, fx.Node, fx.Node]
    """`far`, `near` and `fan`."""
    splits: tuple[list[fx.Node], ...]
    """Rows sent and received by hop 1, then by hop 2."""
    launches: tuple[fx.Node, fx.Node]
    rows: fx.Node


def exchange_table(form: DividedForm) -> Table:
    """Exchange the table where counts are exchanged."""
    region, nodes = form.region, form.nodes
    emit = Emitter(region.count_exchange)
    sizes = (nodes.num_nodes, nodes.num_local)
    told = emit.call(HOP_TABLE, form.chosen, region.counts, *sizes)
    table, tokens = (emit.call(operator.getitem, told, i) for i in range(2))
    even = [1] * region.num_ranks
    launch = emit.call(C10D.all_to_all_single, table, even, even, region.group)
    emit = Emitter(region.received_counts)
    everyone = emit.method("view", emit.call(C10D.wait_tensor, launch), *sizes, -1)
    everyone = emit.method("to", everyone, torch.int64)
    experts = (EVERY, EVERY, slice(None, region.num_local_experts))
    return Table(everyone, tokens, emit.call(operator.getitem, everyone, experts))


def as_received(region: MoERegion, table: Table) -> fx.Node:
    """Emit the counts in the form in which the region receives its own."""
    emit, tensor = Emitter(region.received_counts), tensor_of(region.received_counts)
    assert tensor is not None
    shaped = emit.method("reshape", table.received, list(tensor.shape))
    return emit.method("to", shaped, tensor.dtype)


def total_of(emit: Emitter, sizes: list[fx.Node]) -> fx.Node:
    """Emit the sum of what the host knows."""
    return emit.call(torch.sym_sum, sizes)


def emit_hops(
    emit: Emitter,
    form: DividedForm,
    table: Table,
    splits: tuple[list[fx.Node], ...],
    num_rows: fx.Node,
) -> Hops:
    """Emit both hops: the rows of this rank's experts, as tokens have them."""
    region, nodes = form.region, form.nodes
    far_sent, far_got, near_sent, near_got = splits
    per_node = nodes.num_local * region.num_local_experts
    num_far, num_near = total_of(emit, far_sent), total_of(emit, near_sent)
    first = emit.call(FAR_ROWS, form.chosen, nodes.num_nodes, per_node, num_far)
    far, masks = (emit.call(operator.getitem, first, i) for i in range(2))
    if (part := form.found.part) is not None and part.first != 0:
        far = emit.call(operator.add, far, part.first)
    across = (far_got, far_sent, nodes.cross)
    of_masks = emit.call(C10D.all_to_all_single, masks, *across)
    tokens = emit.method("detach", form.found.tokens)
    hop_1 = emit.call(C10D.all_to_all_single, emit.method("index_select", tokens, 0, far), *across)
    masks = emit.call(C10D.wait_tensor, of_masks)
    near = emit.call(NEAR_ROWS, masks, per_node, num_near)
    there = emit.call(C10D.wait_tensor, hop_1)
    on = emit.method("index_select", there, 0, near)
    hop_2 = emit.call(C10D.all_to_all_single, on, near_got, near_sent, nodes.node)
    _note_nominal_rows(form, (of_masks, hop_1), hop_2)
    fan = emit.call(FAN_ROWS, table.received, num_rows)
    rows = emit.method("index_select", emit.call(C10D.wait_tensor, hop_2), 0, fan)
    return Hops((far, near, fan), splits, (hop_1, hop_2), rows)


def _note_nominal_rows(form: DividedForm, across: tuple[fx.Node, ...], inside: fx.Node) -> None:
    """Note on launches of both hops what they send where experts are chosen evenly, for prices."""
    region, nodes, chosen = form.region, form.nodes, tensor_of(form.chosen)
    if chosen is None or type(num_rows := chosen.numel()) is not int:
        return
    shape = HopShape(
        num_nodes=nodes.num_nodes,
        num_local=nodes.num_local,
        num_experts=region.num_ranks * region.num_local_experts,
        rows_per_token=chosen.shape[-1],
        row_bytes=0.0,
    )
    tokens = num_rows / shape.rows_per_token
    note_nominal_rows(across, round(tokens * shape.nodes_per_token))
    note_nominal_rows([inside], num_rows)
