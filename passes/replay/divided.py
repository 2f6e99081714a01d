"""Run a MoE region on rows that come in two hops: a token crosses to a node once.

Contract
    Requires  a proof of the region, the gather that made the rows, the sum that follows, experts
              chosen once by a token, and the groups of ranks that share a node.
    Keeps     every value the graph has outside the region, bit for bit: the experts get the rows,
              in the order, that the all-to-all would bring, and each gradient has the same terms.
    Sends     forward rows, and backward gradients of sums, in two hops; what is summed per token,
              the results and the gradients of rows, flat and un-summed, in the order it had.

Pseudo-code
    where counts are exchanged: the table that tells every rank the sizes of all exchanges
    one read by the host: these sizes
    hop 1 of tokens -> hop 2 -> changed as the model changes rows at home: the experts' rows
    the region's body on them -> home, without a gradient -> the model's own sum per token
    that sum, its gradient sent in two hops and changed as the model's would be
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import torch.fx as fx

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D, input_splits, output_splits, tensor_of, waits_on
from moe_compile.ops.hop_rows import FAN_ROWS, FAR_ROWS, HOP_SIZES, HOP_TABLE, NEAR_ROWS
from moe_compile.ops.two_hops import ROWS_RECEIVED, SUMMED_AT_HOME
from moe_compile.regions.new_order import parts
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.rewrites import Surroundings
from moe_compile.regions.token_regions import DividedForm
from passes.replay.changed_rows import changed_rows, weighted_rows, weights_of_rows
from passes.replay.host_reads import BulkRead
from passes.replay.replayed import Replay, emit_rest, emit_until_reads, needed_for

EVERY: Final = slice(None)
Way: TypeAlias = tuple[list[Any], list[Any]]
"""Rows that an exchange receives from each rank, and sends to each."""


@dataclass(frozen=True, slots=True)
class Divided:
    """What a region became."""

    instead: dict[fx.Node, fx.Node]
    """What the graph outside the region reads -> what to read instead."""
    hops: tuple[fx.Node, fx.Node]
    """Launches that bring the rows."""
    combine: fx.Node


@dataclass(frozen=True, slots=True)
class _Table:
    """What every rank told this one, and what it told of its own."""

    everyone: fx.Node
    """`[N, L, E + L + 1]`, as `moe_compile.ops.hop_rows` has it."""
    tokens: fx.Node
    """How many of this rank's tokens need each node, `[N]`."""
    received: fx.Node
    """Its part that says how many rows of each sender each expert of this rank gets, `[N, L, E]`"""


@dataclass(frozen=True, slots=True)
class _Hops:
    """The way of tokens to this rank's experts, as operators take it."""

    indices: tuple[fx.Node, fx.Node, fx.Node]
    """`far`, `near` and `fan`."""
    splits: tuple[list[fx.Node], ...]
    """Rows sent and received by hop 1, then by hop 2."""
    launches: tuple[fx.Node, fx.Node]
    rows: fx.Node


def emit_divided(form: DividedForm, around: Surroundings, dependence: Dependence) -> Divided:
    """Emit the region in its new form; the old one is for the caller to take out.

    `around` says where the host reads, and which host reads of the region others need.
    `dependence` is of the graph as it was before any region was emitted.
    """
    region, found = form.region, form.found
    table = _exchange_table(form)
    replay = Replay(range(region.num_local_experts), {})
    instead: dict[fx.Node, fx.Node] = {}
    if form.told:
        received = _as_received(region, table)
        instead[region.received_counts] = replay.env[region.received_counts] = received
    splits, num_rows = _read_host(form, table, replay, around, dependence)
    emit = Emitter(region.result)
    hops = _hop(emit, form, table, splits, num_rows)
    emit_rest(emit, region.count_side, replay)
    way = _splits_of(region, replay)
    early = {factor: factor for factor in _factors(form, found.before)}
    factors = _send_factors(emit, form, early, way)
    rows = changed_rows(emit, found.gather, hops.rows, found.before, factors)
    rows = emit.call(ROWS_RECEIVED, rows, region.rows, *way, region.group)
    sent = _run_experts(emit, region, replay, rows)
    combine = emit.copy(region.combine, _sends(region, emit.method("detach", sent), replay))
    result = instead[region.result] = emit.call(C10D.wait_tensor, combine)
    result.meta.update(region.result.meta)  # later passes read its sizes
    instead |= {node: replay.env[node] for node in around.served}
    instead[found.sums.total] = _sum_at_home(form, hops, sent, factors, way)
    return Divided(instead, hops.launches, combine)


def _exchange_table(form: DividedForm) -> _Table:
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
    return _Table(everyone, tokens, emit.call(operator.getitem, everyone, experts))


def _as_received(region: MoERegion, table: _Table) -> fx.Node:
    """Emit the counts in the form in which the region receives its own."""
    emit, tensor = Emitter(region.received_counts), tensor_of(region.received_counts)
    assert tensor is not None
    shaped = emit.method("reshape", table.received, list(tensor.shape))
    return emit.method("to", shaped, tensor.dtype)


def _read_host(
    form: DividedForm,
    table: _Table,
    replay: Replay,
    around: Surroundings,
    dependence: Dependence,
) -> tuple[tuple[list[fx.Node], ...], fx.Node]:
    """Emit the one read of all that the host must know; return sizes of hops and rows received."""
    region, nodes = form.region, form.nodes
    emit = Emitter(around.read_at)
    reads = BulkRead(emit)
    part_of = parts(region, around.bulk, dependence)
    needed = needed_for((*around.bulk, *around.served), region, dependence)
    emit_until_reads(emit, region, replay, reads, part_of, needed)
    reads.add_sum(emit.method("sum", region.counts), replay, input_splits(region.dispatch))
    received = emit.method("sum", table.received)
    num_rows = reads.add_sum(received, replay, output_splits(region.dispatch))
    sizes = emit.call(HOP_SIZES, table.everyone, table.tokens, nodes.place)
    lengths = (nodes.num_nodes, nodes.num_nodes, nodes.num_local, nodes.num_local)
    asked = iter(reads.add_vector(sizes, sum(lengths)))
    values = reads.finish()
    replay.env.update({n: values[i] for n, i in reads.asked_by(replay).items()})
    splits = tuple([values[next(asked)] for _ in range(length)] for length in lengths)
    return splits, values[num_rows]


def _hop(
    emit: Emitter,
    form: DividedForm,
    table: _Table,
    splits: tuple[list[fx.Node], ...],
    num_rows: fx.Node,
) -> _Hops:
    """Emit both hops: the rows of this rank's experts, as tokens have them."""
    region, nodes = form.region, form.nodes
    far_sent, far_got, near_sent, near_got = splits
    per_node = nodes.num_local * region.num_local_experts
    num_far, num_near = (emit.call(torch.sym_sum, sizes) for sizes in (far_sent, near_sent))
    first = emit.call(FAR_ROWS, form.chosen, nodes.num_nodes, per_node, num_far)
    far, masks = (emit.call(operator.getitem, first, i) for i in range(2))
    across = (far_got, far_sent, nodes.cross)
    of_masks = emit.call(C10D.all_to_all_single, masks, *across)
    tokens = emit.method("detach", form.found.tokens)
    hop_1 = emit.call(C10D.all_to_all_single, emit.method("index_select", tokens, 0, far), *across)
    masks = emit.call(C10D.wait_tensor, of_masks)
    near = emit.call(NEAR_ROWS, masks, per_node, num_near)
    there = emit.call(C10D.wait_tensor, hop_1)
    on = emit.method("index_select", there, 0, near)
    hop_2 = emit.call(C10D.all_to_all_single, on, near_got, near_sent, nodes.node)
    fan = emit.call(FAN_ROWS, table.received, num_rows)
    rows = emit.method("index_select", emit.call(C10D.wait_tensor, hop_2), 0, fan)
    return _Hops((far, near, fan), splits, (hop_1, hop_2), rows)


def _factors(form: DividedForm, readers: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the factors of rows that `readers` read."""
    read = {i for node in readers for i in node.all_input_nodes}
    return [factor for factor in form.found.factors if factor in read]


def _run_experts(emit: Emitter, region: MoERegion, replay: Replay, rows: fx.Node) -> fx.Node:
    """Emit the region's body on `rows`; return what it sends back."""
    replay.env.update(dict.fromkeys((region.dispatch, *waits_on(region.dispatch)), rows))
    back = {region.combine, *waits_on(region.combine)}
    emit_rest(emit, [node for node in region.row_side if node not in back], replay)
    sent = region.combine.all_input_nodes[0]
    made = replay.env.get(sent, sent)
    assert isinstance(made, fx.Node)
    return made


def _sends(region: MoERegion, rows: fx.Node, replay: Replay) -> dict[fx.Node, Any]:
    """Return what the combine of the region reads where it sends `rows`."""
    return {**replay.env, region.combine.all_input_nodes[0]: rows}


def _sum_at_home(
    form: DividedForm,
    hops: _Hops,
    rows: fx.Node,
    factors: Mapping[fx.Node, fx.Node],
    way: Way,
) -> fx.Node:
    """Emit the model's sum with the gradient of `rows`, which were sent home, coming in two hops.

    What `rows` are made here, as the model changes them at home before it adds them up, is read for
    its gradient alone.
    """
    region, found, sums = form.region, form.found, form.found.sums
    emit = Emitter(sums.total.next)
    late = {factor: factor for factor in _factors(form, found.after) if factor not in factors}
    if sums.weights is not None:
        late[sums.weights] = weights_of_rows(emit, sums)
    factors = {**factors, **_send_factors(emit, form, late, way)}
    rows = changed_rows(emit, region.result, rows, found.after, factors)
    rows = weighted_rows(emit, sums, rows, factors)
    names = (form.nodes.cross, form.nodes.node)
    return emit.call(SUMMED_AT_HOME, sums.total, rows, *hops.indices, *hops.splits, *names)


def _splits_of(region: MoERegion, replay: Replay) -> Way:
    """Return what the dispatch receives from each rank, and sends to each."""
    received, sent = output_splits(region.dispatch), input_splits(region.dispatch)
    return [replay.env.get(n, n) for n in received], [replay.env.get(n, n) for n in sent]


def _send_factors(
    emit: Emitter, form: DividedForm, factors: Mapping[fx.Node, fx.Node], way: Way
) -> dict[fx.Node, fx.Node]:
    """Emit, for the rows of this rank's experts, what the model has for its rows, each by its name.

    They go flat, a number for each row, and get no gradient here: the model's own use gives it.
    """
    group = form.region.group
    launches = {
        name: emit.call(C10D.all_to_all_single, emit.method("detach", factor), *way, group)
        for name, factor in factors.items()
    }
    return {name: emit.call(C10D.wait_tensor, launch) for name, launch in launches.items()}
