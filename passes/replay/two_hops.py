"""Run a MoE region on rows that travel in two hops: a token crosses to a node once.

Contract
    Requires  a proof of the region, the gather that made the rows, the sum that follows, experts
              chosen once by a token, and the groups of ranks that share a node.
    Keeps     the experts' rows, bit for bit and in the order that the all-to-all would bring, and
              the terms of every sum and gradient; unless sums are made on the nodes (`rounds`) also
              every value that the graph has outside the region.
    Sends     forward rows, and backward gradients of sums, in two hops. The terms of sums per
              token, which are results and gradients of rows, go flat and un-summed, in their old
              order, or (`rounds`) in two hops as well, summed on the node.
    Order     where the model dispatches, hop 1 of all slices of tokens, hop 2 of each slice once
              that has arrived; at the region's result per chunk of experts: wait, experts, the way
              home. A chunk has the rows of all slices.

Pseudo-code
    where counts are exchanged: the table that gives every rank the sizes of all exchanges
    one read by the host: these sizes
    hop 1 of tokens -> hop 2 -> changed as the model changes rows at home: the experts' rows
    the region's body on those of each chunk -> home, without a gradient -> the model's own sum
                              or, if it rounds, changed as at home -> back, summed after each hop
    that sum, its gradient sent in two hops and changed as the model's would be

`emit_sums` emits the way home: rows are summed on the node, then at home.
A token's rows cross from a node as one, in the type of its sum or, as rows inside the node, in
eight bits. Orders and types are those of `moe_compile.ops.two_hops`; each collective is a node of
its own.

`FactorExchange` sends the factors of the model's rows: a number for each row.
They go flat and at once, and so do their gradients home, where sums are made on the nodes. In the
other case they get none here: the model's own use gives it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D, input_splits, output_splits, tensor_of, waits_on
from moe_compile.ops.hop_rows import BACK_ROWS, CHUNK_ROWS, HOP_SIZES
from moe_compile.ops.permute import PERMUTE_ROWS
from moe_compile.ops.row_sums import SUM_OF_PLACES, wide_type
from moe_compile.ops.two_hops import PLACES_OF, ROWS_RECEIVED, SUMMED_AT_HOME, TOKENS_RECEIVED
from moe_compile.regions.regions import MoERegion, RowProof
from moe_compile.regions.rewrites import Effects
from moe_compile.regions.token_regions import TwoHopForm
from passes.replay.chunk_axis import ChunkAxis, slice_to_chunk, split_by_experts, split_weights
from passes.replay.chunk_reads import ChunkReads, read_chunks
from passes.replay.hops import (
    Hops,
    HopSplit,
    RowWire,
    Sizes,
    Table,
    as_received,
    as_rows,
    as_sent,
    emit_arrival,
    emit_hops,
    exchange_table,
    gradient_wire,
    launched,
    split_rows,
    total_of,
)
from passes.replay.host_reads import extent
from passes.replay.masked_replay import assert_all_are_sent, emit_results, emit_row_order
from passes.replay.prune import prune_other_experts
from passes.replay.replayed import Replay, changed_rows, emit_rest, weighted_rows, weights_of_rows


@dataclass(frozen=True, slots=True)
class Divided:
    """The new form of a region."""

    instead: dict[fx.Node, fx.Node]
    """Node that the graph outside the region reads -> its replacement."""
    hops: tuple[fx.Node, ...]
    """Launches that bring the rows."""
    combines: tuple[fx.Node, ...]
    """Launches that bring the results home."""


@dataclass(slots=True)
class _Arrived:
    """The state of a region once its tokens have arrived."""

    form: TwoHopForm
    proof: RowProof
    cut: HopSplit
    table: Table
    reads: ChunkReads
    hops: Hops
    replays: list[Replay]
    axis: ChunkAxis | None
    """The division of the rows sent into chunks; None where there is one."""
    exchange: FactorExchange
    factors: Factors
    """Factors that the model applies before its dispatch."""


def emit_two_hops(form: TwoHopForm, proof: RowProof, cut: HopSplit, effects: Effects) -> Divided:
    """Emit the region in its new form; the caller removes the old one.

    `effects` says where the host reads, and which host reads of the region others need.
    """
    region = form.region
    table = exchange_table(form, cut)
    instead: dict[fx.Node, fx.Node] = {}
    if form.told:
        instead[region.received_counts] = as_received(region, table)
    emit = Emitter(effects.read_at)
    whole, replays, axis = Replay(range(region.num_local_experts), dict(instead)), [], None
    if len(cut.chunks) == 1:
        replays.append(whole)
    else:
        axis = split_by_experts(emit, region, len(cut.chunks), instead)
        pairs = zip(axis.inputs, cut.chunks, strict=True)
        replays += [Replay(e, env, prune_other_experts(region, proof, e)) for env, e in pairs]
    sizes = emit.call(HOP_SIZES, table.everyone, table.tokens, list(cut.edges), form.nodes.place)
    told = {"received": table.received, "others": (sizes, Sizes.number(form, cut))}
    reads = read_chunks(emit, region, whole, replays, effects, **told)
    emit = Emitter(_first_place(region, effects))
    hops = emit_hops(emit, form, cut, table, Sizes.of(form, cut, reads.others), reads.received)
    emit = Emitter(region.result)
    for replay in replays:
        emit_rest(emit, region.count_side, replay)
    way = _whole_way(emit, region, replays)
    exchange = FactorExchange(form, cut, table, reads.received, way)
    early = {factor: factor for factor in _factors(form, form.found.before)}
    factors = exchange.send(emit, early)
    arrived = _Arrived(form, proof, cut, table, reads, hops, replays, axis, exchange, factors)
    two_hops = _summed_on_nodes(emit, arrived) if form.rounds else _summed_as_written(emit, arrived)
    served = {node: whole.env[node] for node in effects.served}
    return Divided(instead | served | two_hops.instead, two_hops.hops, two_hops.combines)


def _first_place(region: MoERegion, effects: Effects) -> fx.Node:
    """Return the first place where the host's integers, and the rows to send, are there.

    Hops without gradients may be launched there, before the host's read for the rest.
    """
    place, dispatch = region.facts.dependence.position, region.dispatched[0].launch
    return dispatch if place[effects.read_at] < place[dispatch] else region.result


def _summed_as_written(emit: Emitter, arrived: _Arrived) -> Divided:
    """Emit the experts, the flat way home, and the model's sum with a gradient in two hops."""
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


def _factors(form: TwoHopForm, readers: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the factors of rows that `readers` read."""
    read = {i for node in readers for i in node.all_input_nodes}
    return [factor for factor in form.found.factors if factor in read]


def _run_experts(emit: Emitter, arrived: _Arrived, rows: Sequence[fx.Node]) -> list[fx.Node]:
    """Emit the region's body on the rows of each chunk; return the rows that each sends back."""
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
    """Return the environment for the region's combine, with `rows` as its input."""
    return {**replay.env, region.combine.all_input_nodes[0]: rows}


def _changed_after(emit: Emitter, arrived: _Arrived, rows: Sequence[fx.Node]) -> list[fx.Node]:
    """Emit the model's changes at home to each chunk's rows, up to the sum."""
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
    """Return the dispatch's splits: rows received from each rank, and sent to each."""
    received, sent = output_splits(region.dispatch), input_splits(region.dispatch)
    return [replay.env.get(n, n) for n in received], [replay.env.get(n, n) for n in sent]


def _whole_way(emit: Emitter, region: MoERegion, replays: Sequence[Replay]) -> Way:
    """Return the splits of all chunks' dispatches added up, as in `_splits_of`."""
    ways = [_splits_of(region, replay) for replay in replays]
    if len(ways) == 1:
        return ways[0]
    both = [
        [emit.call(torch.sym_sum, list(of_rank)) for of_rank in zip(*of_chunks, strict=True)]
        for of_chunks in zip(*ways, strict=True)
    ]
    return both[0], both[1]


@dataclass(frozen=True, slots=True)
class WayHome:
    """The index tensors of the way home."""

    back: list[fx.Node]
    """Order of each chunk's rows as they arrived."""
    on_node: list[fx.Node]
    """For each slice, places of each row of hop 1 among the rows that return to its place on
    the node."""
    at_home: fx.Node
    """Places of each token among the rows that return home."""


def emit_way_home(
    emit: Emitter, form: TwoHopForm, table: Table, hops: Hops, num_rows: list[fx.Node]
) -> WayHome:
    """Emit the index tensors of the way home."""
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
    emit: Emitter, form: TwoHopForm, rows: list[fx.Node], home: WayHome, hops: Hops
) -> tuple[tuple[fx.Node, ...], fx.Node]:
    """Emit the sums per token of each chunk's `rows`, added to the model's own addend.

    Return the launches, and the sums in the type of the model's, rounded to it once. A node
    adds up the rows of a slice by expert, once those of all chunks are there.
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


Way: TypeAlias = tuple[list[Any], list[Any]]
"""Rows that an exchange receives from each rank, and sends to each."""
Factors: TypeAlias = list[dict[fx.Node, fx.Node]]
"""For each chunk: a factor of the model's rows -> the factor of the chunk's rows."""


@dataclass(slots=True)
class FactorExchange:
    """The exchange of a region's factors."""

    form: TwoHopForm
    cut: HopSplit
    table: Table
    received: list[fx.Node]
    """Rows of each chunk."""
    way: Way
    """Splits of the flat exchange of all chunks."""
    _by_chunk: tuple[fx.Node, fx.Node] | None = None

    def send(self, emit: Emitter, factors: Mapping[fx.Node, fx.Node]) -> Factors:
        """Emit the factors of each chunk's rows, by the names of the model's factors."""
        way = (*self.way, self.form.region.group)
        launches = {
            name: emit.call(C10D.all_to_all_single, emit.method("detach", factor), *way)
            for name, factor in factors.items()
        }
        came = {name: emit.call(C10D.wait_tensor, launch) for name, launch in launches.items()}
        if self.form.rounds:
            came = {
                name: emit.call(ROWS_RECEIVED, came[name], factor, *way, False)
                for name, factor in factors.items()
            }
        if len(self.cut.chunks) == 1:
            return [came]
        found: Factors = [{} for _ in self.cut.chunks]
        for name, numbers in came.items():
            moved = emit.call(PERMUTE_ROWS, numbers, *self._order(emit))
            for own, part in zip(found, split_rows(emit, moved, self.received), strict=True):
                own[name] = part
        return found

    def _order(self, emit: Emitter) -> tuple[fx.Node, fx.Node]:
        """Return the order of flat rows by chunk, emitted once, and its inverse."""
        if self._by_chunk is None:
            num_rows = emit.call(torch.sym_sum, self.received)
            both = emit.call(CHUNK_ROWS, self.table.whole, list(self.cut.edges), num_rows)
            order, inverse = (emit.call(operator.getitem, both, i) for i in range(2))
            self._by_chunk = order, inverse
        return self._by_chunk
