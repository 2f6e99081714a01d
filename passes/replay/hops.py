"""Emit the dispatch of tokens in two hops: the table of sizes, the messages, both exchanges.

Contract
    Every index is computed on the device, as in `moe_compile.ops.hop_rows`; the caller lets the
    host read the sizes that `moe_compile.ops.hop_rows.hop_sizes` lists.
    Rows are sent as messages of eight bits where a wire is given. A message is packed once and may
    be moved, cut and handed on as rows are (`moe_compile.ops.packed_rows`). It carries no gradient:
    operators which receive rows do.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from moe_compile.cost.hop_shape import HopShape
from moe_compile.cost.sizes import note_nominal_rows
from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D, tensor_of
from moe_compile.ops.hop_rows import FAN_ROWS, FAR_ROWS, HOP_TABLE, NEAR_ROWS
from moe_compile.ops.quantized_rows import (
    GATHER_QUANTIZE_PACK,
    UNPACK_DEQUANTIZE,
    UNPACK_DEQUANTIZE_PERMUTE,
)
from moe_compile.ops.two_hops import grouped
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.token_regions import TwoHopForm


@dataclass(frozen=True, slots=True)
class RowWire:
    """The eight-bit form of rows on the wire."""

    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, wire: str, rows: fx.Node) -> RowWire | None:
        """Return an option's wire for rows like `rows`; None where they are sent unchanged."""
        if wire == "same":
            return None
        tensor = tensor_of(rows)
        assert tensor is not None
        return cls(int(tensor.shape[1]), tensor.dtype)


def gradient_wire(wire: str, rows: fx.Node) -> RowWire | None:
    """Return an option's wire for the gradients of rows like `rows`."""
    return RowWire.of(wire, rows) if wire == "fp8" else None


def as_sent(emit: Emitter, rows: fx.Node, index: fx.Node | None, wire: RowWire | None) -> fx.Node:
    """Emit the message of rows `index` of `rows`, or of all."""
    if wire is not None:
        return emit.call(GATHER_QUANTIZE_PACK, rows, *(() if index is None else (index,)))
    return rows if index is None else emit.method("index_select", rows, 0, index)


def as_rows(emit: Emitter, came: fx.Node, index: fx.Node | None, wire: RowWire | None) -> fx.Node:
    """Emit rows `index` of the message received, or all of them."""
    if wire is None:
        return came if index is None else emit.method("index_select", came, 0, index)
    if index is None:
        return emit.call(UNPACK_DEQUANTIZE, came, wire.width, wire.dtype)
    return emit.call(UNPACK_DEQUANTIZE_PERMUTE, came, index, wire.width, wire.dtype)


@dataclass(frozen=True, slots=True)
class HopSplit:
    """The parts in which rows travel, as in `moe_compile.ops.hop_rows`: 1 and 1 for none."""

    edges: tuple[int, ...]
    """The first of this rank's experts in each chunk, and behind them the number of experts."""
    slices: int

    @property
    def chunks(self) -> tuple[range, ...]:
        """The experts of each chunk."""
        return tuple(range(first, last) for first, last in itertools.pairwise(self.edges))


@dataclass(frozen=True, slots=True)
class Table:
    """The sizes of all ranks' exchanges, and this rank's own."""

    everyone: fx.Node
    """Table `[N, L, S, E + C L + 1]`, as in `moe_compile.ops.hop_rows`."""
    tokens: fx.Node
    """Number of this rank's tokens that need each node, `[S, N]`."""
    received: tuple[fx.Node, ...]
    """Its part for this rank: rows of each sender for each expert, a tensor for each chunk,
    `[N, L, S, experts]`."""
    whole: fx.Node
    """The same for all chunks."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows of hop 1 sent to and got from each node, by slice; of hop 2 and each place, also by
    chunk."""

    far_sent: list[list[fx.Node]]
    far_got: list[list[fx.Node]]
    near_sent: list[list[list[fx.Node]]]
    near_got: list[list[list[fx.Node]]]

    @classmethod
    def of(cls, form: TwoHopForm, cut: HopSplit, values: list[fx.Node]) -> Sizes:
        """Return the sizes that the host read, ordered as `moe_compile.ops.hop_rows.hop_sizes`."""
        nodes, chunks = form.nodes, len(cut.edges) - 1
        of_hop_1, of_hop_2 = cut.slices * nodes.num_nodes, cut.slices * chunks * nodes.num_local
        edges = itertools.accumulate((of_hop_1, of_hop_1, of_hop_2, of_hop_2), initial=0)
        far_sent, far_got, near_sent, near_got = (
            values[first:last] for first, last in itertools.pairwise(edges)
        )
        return cls(
            grouped(far_sent, cut.slices),
            grouped(far_got, cut.slices),
            grouped(near_sent, cut.slices, chunks),
            grouped(near_got, cut.slices, chunks),
        )

    @staticmethod
    def number(form: TwoHopForm, cut: HopSplit) -> int:
        """Return the number of sizes."""
        nodes, chunks = form.nodes, len(cut.edges) - 1
        return 2 * cut.slices * (nodes.num_nodes + chunks * nodes.num_local)

    @property
    def flat(self) -> tuple[list[fx.Node], ...]:
        """The sizes in the form that operators take."""
        once = (_chained(sizes) for sizes in (self.far_sent, self.far_got))
        twice = (_chained(map(_chained, sizes)) for sizes in (self.near_sent, self.near_got))
        return (*once, *twice)


@dataclass(frozen=True, slots=True)
class Hops:
    """The dispatch of tokens to this rank's experts, in the form that operators take."""

    far: fx.Node
    near: list[fx.Node]
    """Indices of hop 2 for each slice."""
    fan: list[fx.Node]
    """Order of the rows of each chunk."""
    at_home: fx.Node
    """The slot of each row of `far` among those of its token, by node."""
    on_node: list[fx.Node]
    """The slot of each row of `near` among those of its row of `far`, by expert."""
    sizes: Sizes
    hop_1: list[fx.Node]
    """Launches of hop 1, for each slice."""
    hop_2: list[list[fx.Node]]
    """Launches of hop 2, for each chunk of each slice."""

    @property
    def launches(self) -> tuple[fx.Node, ...]:
        """All launches, in order."""
        return (*self.hop_1, *_chained(self.hop_2))


def exchange_table(form: TwoHopForm, cut: HopSplit) -> Table:
    """Exchange the table where counts are exchanged."""
    region, nodes, edges = form.region, form.nodes, list(cut.edges)
    emit = Emitter(region.count_exchange)
    shape = (nodes.num_nodes, nodes.num_local)
    told = emit.call(HOP_TABLE, form.chosen, region.counts, *shape, edges, cut.slices)
    table, tokens = (emit.call(operator.getitem, told, i) for i in range(2))
    even = [1] * region.num_ranks
    launch = emit.call(C10D.all_to_all_single, table, even, even, region.group)
    emit = Emitter(region.received_counts)
    everyone = emit.method("view", emit.call(C10D.wait_tensor, launch), *shape, cut.slices, -1)
    everyone = emit.method("to", everyone, torch.int64)
    parts = [_of_experts(emit, everyone, chunk) for chunk in cut.chunks]
    whole = parts[0]
    if len(parts) > 1:
        whole = _of_experts(emit, everyone, range(region.num_local_experts))
    return Table(everyone, tokens, tuple(parts), whole)


def _of_experts(emit: Emitter, everyone: fx.Node, experts: range) -> fx.Node:
    """Emit a table's part for some of this rank's experts."""
    return emit.call(operator.getitem, everyone, (..., slice(experts.start, experts.stop)))


def as_received(region: MoERegion, table: Table) -> fx.Node:
    """Emit the counts in the form in which the region receives its own."""
    emit, tensor = Emitter(region.received_counts), tensor_of(region.received_counts)
    assert tensor is not None
    shaped = emit.method("reshape", emit.method("sum", table.whole, 2), list(tensor.shape))
    return emit.method("to", shaped, tensor.dtype)


def total_of(emit: Emitter, sizes: list[fx.Node]) -> fx.Node:
    """Emit the sum of sizes that the host knows."""
    return emit.call(torch.sym_sum, sizes)


def emit_hops(
    emit: Emitter,
    form: TwoHopForm,
    cut: HopSplit,
    table: Table,
    sizes: Sizes,
    num_rows: list[fx.Node],
) -> Hops:
    """Emit the launches of both hops: the rows of this rank's experts, as tokens have them.

    `num_rows` are those of each chunk. Hop 2 of a slice is launched once its hop 1 has arrived.
    In eight bits a token is packed once, and hop 2 hands messages on. Nothing here has a gradient.
    """
    region, nodes = form.region, form.nodes
    wire = RowWire.of(form.dispatch_wire, form.found.tokens)
    per_node = nodes.num_local * region.num_local_experts
    num_far = total_of(emit, _chained(sizes.far_sent))
    first = emit.call(FAR_ROWS, form.chosen, nodes.num_nodes, per_node, cut.slices, num_far)
    far, masks, at_home = (emit.call(operator.getitem, first, i) for i in range(3))
    if (part := form.found.part) is not None and part.first != 0:
        far = emit.call(operator.add, far, part.first)
    tokens = emit.method("detach", form.found.tokens)
    across = (sizes.far_got, sizes.far_sent)
    of_masks = launched(emit, masks, *across, nodes.cross)
    hop_1 = launched(emit, as_sent(emit, tokens, far, wire), *across, nodes.cross)
    near: list[fx.Node] = []
    on_node: list[fx.Node] = []
    hop_2: list[list[fx.Node]] = []
    for of_slice, launch in enumerate(hop_1):
        masks = emit.call(C10D.wait_tensor, of_masks[of_slice])
        sent = sizes.near_sent[of_slice]
        num_near = total_of(emit, _chained(sent))
        on = emit.call(NEAR_ROWS, masks, per_node, list(cut.edges), num_near)
        near.append(emit.call(operator.getitem, on, 0))
        on_node.append(emit.call(operator.getitem, on, 1))
        there = emit.call(C10D.wait_tensor, launch)
        there = emit.method("index_select", there, 0, near[-1])
        hop_2.append(launched(emit, there, sizes.near_got[of_slice], sent, nodes.node))
    of_chunks = zip(table.received, num_rows, strict=True)
    fan = [emit.call(FAN_ROWS, counts, number) for counts, number in of_chunks]
    _note_nominal_rows(form, cut, (*of_masks, *hop_1), _chained(hop_2))
    return Hops(far, near, fan, at_home, on_node, sizes, hop_1, hop_2)


def emit_arrival(emit: Emitter, form: TwoHopForm, hops: Hops) -> list[fx.Node]:
    """Emit the rows of each chunk once both hops have arrived, in the order of the all-to-all."""
    wire = RowWire.of(form.dispatch_wire, form.found.tokens)
    came = (
        [emit.call(C10D.wait_tensor, launch) for launch in of_chunk]
        for of_chunk in zip(*hops.hop_2, strict=True)
    )
    return [
        as_rows(emit, joined(emit, pieces), order, wire)
        for pieces, order in zip(came, hops.fan, strict=True)
    ]


def launched(
    emit: Emitter, rows: fx.Node, got: list[list[fx.Node]], sent: list[list[fx.Node]], group: str
) -> list[fx.Node]:
    """Emit the exchanges of rows in parts, each by its splits."""
    pieces = pieces_of(emit, rows, sent)
    return [
        emit.call(C10D.all_to_all_single, piece, *way, group)
        for piece, *way in zip(pieces, got, sent, strict=True)
    ]


def pieces_of(emit: Emitter, rows: fx.Node, splits: list[list[fx.Node]]) -> list[fx.Node]:
    """Emit the rows in pieces, one for each exchange by its splits."""
    if len(splits) == 1:
        return [rows]
    return split_rows(emit, rows, [total_of(emit, sizes) for sizes in splits])


def split_rows(emit: Emitter, rows: fx.Node, sizes: list[fx.Node]) -> list[fx.Node]:
    """Emit the rows in pieces of these sizes."""
    parts = emit.call(torch.split, rows, sizes)
    return [emit.call(operator.getitem, parts, i) for i in range(len(sizes))]


def joined(emit: Emitter, pieces: list[fx.Node]) -> fx.Node:
    """Emit the concatenation of all pieces."""
    return pieces[0] if len(pieces) == 1 else emit.call(torch.cat, pieces)


def _chained(lists: Iterable[list[fx.Node]]) -> list[fx.Node]:
    return [*itertools.chain.from_iterable(lists)]


def _note_nominal_rows(
    form: TwoHopForm, cut: HopSplit, across: Sequence[fx.Node], inside: Sequence[fx.Node]
) -> None:
    """Note on launches of both hops their rows where experts are chosen evenly, for prices."""
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
    note_nominal_rows(across, round(tokens * shape.nodes_per_token / cut.slices))
    for launches in zip(*[iter(inside)] * len(cut.chunks), strict=True):
        for launch, chunk in zip(launches, cut.chunks, strict=True):
            share = len(chunk) / region.num_local_experts / cut.slices
            note_nominal_rows([launch], round(num_rows * share))
