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
    Order     where the model dispatches, hop 1 of all slices of tokens, hop 2 of each slice once
              that is there; at the region's result per chunk of experts: wait, experts, the way
              home. A chunk has the rows of all slices.

Pseudo-code
    where counts are exchanged: the table that tells every rank the sizes of all exchanges
    one read by the host: these sizes
    hop 1 of tokens -> hop 2 -> changed as the model changes rows at home: the experts' rows
    the region's body on those of each chunk -> home, without a gradient -> the model's own sum
                              or, if it rounds, changed as at home -> back, summed after each hop
    that sum, its gradient sent in two hops and changed as the model's would be
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D, input_splits, output_splits, waits_on
from moe_compile.ops.hop_rows import HOP_SIZES
from moe_compile.ops.hop_sums import TOKENS_RECEIVED
from moe_compile.ops.permute import PERMUTE_ROWS
from moe_compile.ops.two_hops import ROWS_RECEIVED, SUMMED_AT_HOME
from moe_compile.regions.regions import MoERegion, RowProof
from moe_compile.regions.rewrites import Surroundings
from moe_compile.regions.token_regions import DividedForm
from passes.replay.changed_rows import changed_rows, weighted_rows, weights_of_rows
from passes.replay.chunk_axis import ChunkAxis, split_by_experts
from passes.replay.chunk_reads import ChunkReads, read_chunks
from passes.replay.hop_sums import emit_sums, emit_way_home
from passes.replay.hops import (
    Cut,
    Hops,
    Sizes,
    Table,
    as_received,
    emit_arrival,
    emit_hops,
    exchange_table,
    split_rows,
)
from passes.replay.masked_replay import emit_results
from passes.replay.prune import prune_other_experts
from passes.replay.replayed import Replay, emit_rest
from passes.replay.row_order import assert_all_are_sent, emit_row_order
from passes.replay.row_wire import RowWire, as_rows, as_sent, gradient_wire
from passes.replay.sent_factors import FactorExchange, Factors, Way
from passes.replay.weight_slices import slice_to_chunk, split_weights


@dataclass(frozen=True, slots=True)
class Divided:
    """What a region became."""

    instead: dict[fx.Node, fx.Node]
    """What the graph outside the region reads -> what to read instead."""
    hops: tuple[fx.Node, ...]
    """Launches that bring the rows."""
    combines: tuple[fx.Node, ...]
    """Launches that bring the results home."""


@dataclass(slots=True)
class _Arrived:
    """What there is once tokens have come."""

    form: DividedForm
    proof: RowProof
    cut: Cut
    table: Table
    reads: ChunkReads
    hops: Hops
    replays: list[Replay]
    axis: ChunkAxis | None
    """How the rows sent fall apart in chunks; None where there is one."""
    exchange: FactorExchange
    factors: Factors
    """Those that the model has before its dispatch."""


def emit_divided(
    form: DividedForm, proof: RowProof, cut: Cut, around: Surroundings, dependence: Dependence
) -> Divided:
    """Emit the region in its new form; the old one is for the caller to take out.

    `around` says where the host reads, and which host reads of the region others need.
    `dependence` is of the graph as it was before any region was emitted.
    """
    region = form.region
    table = exchange_table(form, cut)
    instead: dict[fx.Node, fx.Node] = {}
    if form.told:
        instead[region.received_counts] = as_received(region, table)
    emit = Emitter(around.read_at)
    whole, replays, axis = Replay(range(region.num_local_experts), dict(instead)), [], None
    if len(cut.chunks) == 1:
        replays.append(whole)
    else:
        axis = split_by_experts(emit, region, len(cut.chunks), instead)
        pairs = zip(axis.inputs, cut.chunks, strict=True)
        replays += [Replay(e, env, prune_other_experts(region, proof, e)) for env, e in pairs]
    sizes = emit.call(HOP_SIZES, table.everyone, table.tokens, list(cut.edges), form.nodes.place)
    told = {"received": table.received, "others": (sizes, Sizes.number(form, cut))}
    reads = read_chunks(emit, region, whole, replays, around, dependence, **told)
    emit = Emitter(_first_place(region, around, dependence))
    hops = emit_hops(emit, form, cut, table, Sizes.of(form, cut, reads.others), reads.received)
    emit = Emitter(region.result)
    for replay in replays:
        emit_rest(emit, region.count_side, replay)
    way = _whole_way(emit, region, replays)
    exchange = FactorExchange(form, cut, table, reads.received, way)
    early = {factor: factor for factor in _factors(form, form.found.before)}
    factors = exchange.send(emit, early)
    arrived = _Arrived(form, proof, cut, table, reads, hops, replays, axis, exchange, factors)
    divided = _summed_on_nodes(emit, arrived) if form.rounds else _summed_as_written(emit, arrived)
    served = {node: whole.env[node] for node in around.served}
    return Divided(instead | served | divided.instead, divided.hops, divided.combines)


def _first_place(region: MoERegion, around: Surroundings, dependence: Dependence) -> fx.Node:
    """Return where what the host reads is there, and all that the model sends.

    Hops without gradients may be launched there: before the host reads for what follows.
    """
    place, dispatch = dependence.position, region.dispatched[0].launch
    return dispatch if place[around.read_at] < place[dispatch] else region.result


def _summed_as_written(emit: Emitter, arrived: _Arrived) -> Divided:
    """Emit the experts, the flat way home, and the sum of the model with a gradient in two hops."""
    form, hops, replays = arrived.form, arrived.hops, arrived.replays
    region, found, total = form.region, form.found, form.found.sums.total
    wire, parts, order = RowWire.of(form.combine_wire, region.result), [region.rows], None
    if arrived.axis is None:
        assert_all_are_sent(emit, region, arrived.reads.sent)  # and so many come back
    else:
        order = emit_row_order(emit, region, arrived.axis, arrived.reads.sent)
        moved = emit.call(PERMUTE_ROWS, region.rows, *order)
        parts = split_rows(emit, moved, arrived.reads.sent)
    rows = []
    came_of = emit_arrival(emit, form, hops)
    for came, part, of, replay in zip(came_of, parts, arrived.factors, replays, strict=True):
        changed = changed_rows(emit, found.gather, came, found.before, of)
        way = (*_splits_of(region, replay), region.group, form.dispatch_wire == "fp8")
        rows.append(emit.call(ROWS_RECEIVED, changed, part, *way))
    rows = _run_experts(emit, arrived, rows)
    combines = []
    for made, replay in zip(rows, replays, strict=True):
        sent = as_sent(emit, emit.method("detach", made), None, wire)
        combines.append(emit.copy(region.combine, _sends(region, sent, replay)))
    for combine, replay in zip(combines, replays, strict=True):
        replay.env[region.result] = as_rows(emit, emit.call(C10D.wait_tensor, combine), None, wire)
    result = replays[0].env[region.result]
    if order is None:
        result.meta.update(region.result.meta)  # later passes read its sizes
    else:
        result = emit_results(emit, region.result, replays, *order)
    emit = Emitter(total.next)
    rows = _changed_after(emit, arrived, rows)
    instead = {region.result: result, total: _with_gradient_in_hops(emit, arrived, total, rows)}
    return Divided(instead, hops.launches, tuple(combines))


def _summed_on_nodes(emit: Emitter, arrived: _Arrived) -> Divided:
    """Emit the experts and the way home in two hops, the gradient of tokens as well."""
    form, hops = arrived.form, arrived.hops
    found, total = form.found, form.found.sums.total
    # read where the model gathers: the gradients of its readers are added up in that order
    tokens = Emitter(found.gather).method("view_as", found.tokens, found.tokens)
    home = emit_way_home(emit, form, arrived.table, hops, arrived.reads.received)
    way = (*hops.sizes.flat, form.nodes.cross, form.nodes.node, form.dispatch_wire == "fp8")
    integers = (home.back, home.on_node, home.at_home)
    came = emit.call(TOKENS_RECEIVED, emit_arrival(emit, form, hops), tokens, *integers, *way)
    rows = []
    for chunk, factors in enumerate(arrived.factors):
        of_chunk = emit.call(operator.getitem, came, chunk)
        rows.append(changed_rows(emit, found.gather, of_chunk, found.before, factors))
    rows = _run_experts(emit, arrived, rows)
    emit = Emitter(total)
    rows = _changed_after(emit, arrived, rows)
    detached = [emit.method("detach", part) for part in rows]
    launches, made = emit_sums(emit, form, detached, home, hops)
    instead = {total: _with_gradient_in_hops(emit, arrived, made, rows)}
    return Divided(instead, hops.launches, launches)


def _factors(form: DividedForm, readers: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the factors of rows that `readers` read."""
    read = {i for node in readers for i in node.all_input_nodes}
    return [factor for factor in form.found.factors if factor in read]


def _run_experts(emit: Emitter, arrived: _Arrived, rows: Sequence[fx.Node]) -> list[fx.Node]:
    """Emit the region's body on the rows of each chunk; return what each sends back."""
    region, proof = arrived.form.region, arrived.proof
    sliceable = proof.sliceable if arrived.axis is not None else ()
    weights = split_weights(emit, sliceable, [len(c) for c in arrived.cut.chunks])
    back = {region.combine, *waits_on(region.combine)}
    body = [node for node in region.row_side if node not in back]
    sent, results = region.combine.all_input_nodes[0], []
    for chunk, (part, replay) in enumerate(zip(rows, arrived.replays, strict=True)):
        replay.env.update(dict.fromkeys((region.dispatch, *waits_on(region.dispatch)), part))
        own = {gemm: weights[gemm][chunk] for gemm in sliceable}
        slice_to_chunk(emit, region, proof, own, replay)
        emit_rest(emit, body, replay)
        made = replay.env.get(sent, sent)
        assert isinstance(made, fx.Node)
        results.append(made)
    return results


def _sends(region: MoERegion, rows: fx.Node, replay: Replay) -> dict[fx.Node, Any]:
    """Return what the combine of the region reads where it sends `rows`."""
    return {**replay.env, region.combine.all_input_nodes[0]: rows}


def _changed_after(emit: Emitter, arrived: _Arrived, rows: Sequence[fx.Node]) -> list[fx.Node]:
    """Emit what the model makes of the rows of each chunk at home before it adds them up."""
    form, found, sums = arrived.form, arrived.form.found, arrived.form.found.sums
    late = {f: f for f in _factors(form, found.after) if f not in arrived.factors[0]}
    if sums.weights is not None:
        late[sums.weights] = weights_of_rows(emit, sums)
    changed = []
    sent = arrived.exchange.send(emit, late)
    for part, early, own in zip(rows, arrived.factors, sent, strict=True):
        factors = {**early, **own}
        part = changed_rows(emit, form.region.result, part, found.after, factors)
        changed.append(weighted_rows(emit, sums, part, factors))
    return changed


def _with_gradient_in_hops(
    emit: Emitter, arrived: _Arrived, total: fx.Node, rows: list[fx.Node]
) -> fx.Node:
    """Emit the sum `total` of `rows`, which are read for their gradient alone."""
    hops, form = arrived.hops, arrived.form
    wire = gradient_wire(form.combine_wire, form.region.result)
    way = (*hops.sizes.flat, form.nodes.cross, form.nodes.node, wire and wire.dtype)
    return emit.call(SUMMED_AT_HOME, total, rows, hops.far, hops.near, hops.fan, *way)


def _splits_of(region: MoERegion, replay: Replay) -> Way:
    """Return what the dispatch receives from each rank, and sends to each."""
    received, sent = output_splits(region.dispatch), input_splits(region.dispatch)
    return [replay.env.get(n, n) for n in received], [replay.env.get(n, n) for n in sent]


def _whole_way(emit: Emitter, region: MoERegion, replays: Sequence[Replay]) -> Way:
    """Return what the dispatch of all chunks receives from each rank, and sends to each."""
    ways = [_splits_of(region, replay) for replay in replays]
    if len(ways) == 1:
        return ways[0]
    both = [
        [emit.call(torch.sym_sum, list(of_rank)) for of_rank in zip(*of_chunks, strict=True)]
        for of_chunks in zip(*ways, strict=True)
    ]
    return both[0], both[1]
