"""Run a MoE region on rows that come in two hops: a token crosses to a node once.

Contract
    Requires  a proof of the region, the gather that made the rows, the sum that follows, experts
              chosen once by a token, and the groups of ranks that share a node.
    Keeps     the experts' rows, bit for bit and in the order that the all-to-all would bring, and
              the terms of every sum and gradient; unless sums are made on the nodes (`rounds`) also
              every value that the graph has outside the region.
    Sends     forward rows, and backward gradients of sums, in two hops; what is summed per token,
              the results and the gradients of rows, flat and un-summed, in the order it had, or
              (`rounds`) in two hops as well, summed on the node.

Pseudo-code
    where counts are exchanged: the table that tells every rank the sizes of all exchanges
    one read by the host: these sizes
    hop 1 of tokens -> hop 2 -> changed as the model changes rows at home: the experts' rows
    the region's body on them -> home, without a gradient -> the model's own sum per token
                              or, if it rounds, changed as at home -> back, summed after each hop
    that sum, its gradient sent in two hops and changed as the model's would be
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.fx as fx

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D, input_splits, output_splits, waits_on
from moe_compile.ops.hop_rows import HOP_SIZES
from moe_compile.ops.hop_sums import TOKENS_RECEIVED
from moe_compile.ops.two_hops import ROWS_RECEIVED, SUMMED_AT_HOME
from moe_compile.regions.new_order import parts
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.rewrites import Surroundings
from moe_compile.regions.token_regions import DividedForm
from passes.replay.changed_rows import changed_rows, weighted_rows, weights_of_rows
from passes.replay.hop_sums import emit_sums, emit_way_home
from passes.replay.hops import Hops, Table, as_received, emit_hops, exchange_table
from passes.replay.host_reads import BulkRead
from passes.replay.replayed import Replay, emit_rest, emit_until_reads, needed_for

Way: TypeAlias = tuple[list[Any], list[Any]]
"""Rows that an exchange receives from each rank, and sends to each."""


@dataclass(frozen=True, slots=True)
class Divided:
    """What a region became."""

    instead: dict[fx.Node, fx.Node]
    """What the graph outside the region reads -> what to read instead."""
    hops: tuple[fx.Node, fx.Node]
    """Launches that bring the rows."""
    combines: tuple[fx.Node, ...]
    """Launches that bring the results home."""


@dataclass(frozen=True, slots=True)
class _Arrived:
    """What there is once tokens have come."""

    form: DividedForm
    table: Table
    num_rows: fx.Node
    """Of this rank's experts."""
    hops: Hops
    replay: Replay
    way: Way
    """Of the flat exchange."""
    factors: Mapping[fx.Node, fx.Node]
    """Factors that the model has before its dispatch -> those of this rank's rows."""


def emit_divided(form: DividedForm, around: Surroundings, dependence: Dependence) -> Divided:
    """Emit the region in its new form; the old one is for the caller to take out.

    `around` says where the host reads, and which host reads of the region others need.
    `dependence` is of the graph as it was before any region was emitted.
    """
    region, found = form.region, form.found
    table = exchange_table(form)
    replay = Replay(range(region.num_local_experts), {})
    instead: dict[fx.Node, fx.Node] = {}
    if form.told:
        received = as_received(region, table)
        instead[region.received_counts] = replay.env[region.received_counts] = received
    splits, num_rows = _read_host(form, table, replay, around, dependence)
    emit = Emitter(region.result)
    hops = emit_hops(emit, form, table, splits, num_rows)
    emit_rest(emit, region.count_side, replay)
    way = _splits_of(region, replay)
    early = {factor: factor for factor in _factors(form, found.before)}
    factors = _send_factors(emit, form, early, way)
    arrived = _Arrived(form, table, num_rows, hops, replay, way, factors)
    divided = _summed_on_nodes(emit, arrived) if form.rounds else _summed_as_written(emit, arrived)
    served = {node: replay.env[node] for node in around.served}
    return Divided(instead | served | divided.instead, divided.hops, divided.combines)


def _summed_as_written(emit: Emitter, arrived: _Arrived) -> Divided:
    """Emit the experts, the flat way home, and the sum of the model with a gradient in two hops."""
    form, hops, way = arrived.form, arrived.hops, arrived.way
    region, found, total = form.region, form.found, form.found.sums.total
    rows = changed_rows(emit, found.gather, hops.rows, found.before, arrived.factors)
    rows = emit.call(ROWS_RECEIVED, rows, region.rows, *way, region.group)
    rows = _run_experts(emit, region, arrived.replay, rows)
    sent = _sends(region, emit.method("detach", rows), arrived.replay)
    combine = emit.copy(region.combine, sent)
    result = emit.call(C10D.wait_tensor, combine)
    result.meta.update(region.result.meta)  # later passes read its sizes
    emit = Emitter(total.next)
    rows = _changed_after(emit, arrived, rows)
    instead = {region.result: result, total: _with_gradient_in_hops(emit, form, hops, total, rows)}
    return Divided(instead, hops.launches, (combine,))


def _summed_on_nodes(emit: Emitter, arrived: _Arrived) -> Divided:
    """Emit the experts and the way home in two hops, the gradient of tokens as well."""
    form, hops = arrived.form, arrived.hops
    found, total = form.found, form.found.sums.total
    # read where the model gathers: the gradients of its readers are added up in that order
    tokens = Emitter(found.gather).method("view_as", found.tokens, found.tokens)
    home = emit_way_home(emit, form, arrived.table, hops, arrived.num_rows)
    way = (*hops.splits, form.nodes.cross, form.nodes.node)
    rows = emit.call(TOKENS_RECEIVED, hops.rows, tokens, *home, *way)
    rows = changed_rows(emit, found.gather, rows, found.before, arrived.factors)
    rows = _run_experts(emit, form.region, arrived.replay, rows)
    emit = Emitter(total)
    rows = _changed_after(emit, arrived, rows)
    launches, made = emit_sums(emit, form, emit.method("detach", rows), home, hops)
    instead = {total: _with_gradient_in_hops(emit, form, hops, made, rows)}
    return Divided(instead, hops.launches, launches)


def _read_host(
    form: DividedForm,
    table: Table,
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


def _changed_after(emit: Emitter, arrived: _Arrived, rows: fx.Node) -> fx.Node:
    """Emit what the model makes of `rows` at home before it adds them up."""
    form, found, sums = arrived.form, arrived.form.found, arrived.form.found.sums
    late = {f: f for f in _factors(form, found.after) if f not in arrived.factors}
    if sums.weights is not None:
        late[sums.weights] = weights_of_rows(emit, sums)
    factors = {**arrived.factors, **_send_factors(emit, form, late, arrived.way)}
    rows = changed_rows(emit, form.region.result, rows, found.after, factors)
    return weighted_rows(emit, sums, rows, factors)


def _with_gradient_in_hops(
    emit: Emitter, form: DividedForm, hops: Hops, total: fx.Node, rows: fx.Node
) -> fx.Node:
    """Emit the sum `total` of `rows`, which are read for their gradient alone."""
    names = (form.nodes.cross, form.nodes.node)
    return emit.call(SUMMED_AT_HOME, total, rows, *hops.indices, *hops.splits, *names)


def _splits_of(region: MoERegion, replay: Replay) -> Way:
    """Return what the dispatch receives from each rank, and sends to each."""
    received, sent = output_splits(region.dispatch), input_splits(region.dispatch)
    return [replay.env.get(n, n) for n in received], [replay.env.get(n, n) for n in sent]


def _send_factors(
    emit: Emitter, form: DividedForm, factors: Mapping[fx.Node, fx.Node], way: Way
) -> dict[fx.Node, fx.Node]:
    """Emit, for the rows of this rank's experts, what the model has for its rows, each by its name.

    They go flat, a number for each row, and so do their gradients home, where sums are made on the
    nodes; else they get none here: the model's own use gives it.
    """
    group = form.region.group
    launches = {
        name: emit.call(C10D.all_to_all_single, emit.method("detach", factor), *way, group)
        for name, factor in factors.items()
    }
    came = {name: emit.call(C10D.wait_tensor, launch) for name, launch in launches.items()}
    if not form.rounds:
        return came
    return {
        name: emit.call(ROWS_RECEIVED, came[name], factor, *way, group)
        for name, factor in factors.items()
    }
