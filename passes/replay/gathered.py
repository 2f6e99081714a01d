"""Run a MoE region on tokens that all ranks gather, and add the results up by a reduce-scatter.

Contract
    Requires  a proof that the experts treat rows independently given the counts, the gather that
              made the rows, the sum that follows, and equally many tokens, and rows, on all ranks.
    Keeps     the experts' input: the rows, their order and the counts are those that the
              all-to-all would bring.
    Every rank receives the routing of all ranks. One exchange of integers serves all slices; a
    factor of rows costs one exchange more, with a gradient. A slice is an equal share of a rank's
    tokens in order, with all their rows.

Pseudo-code
    all-gather the tokens of each slice, the counts and tokens of rows, the factors of rows
    per slice: this rank's rows = the tokens they name, by sender, then expert
               the region's body on those rows and counts
               their sums per token of every rank -> reduce-scatter: this rank's tokens

A `SliceWriter` emits one slice: its rows, its experts, its sums.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.fx as fx

from moe_compile.cost.sizes import note_nominal_rows
from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D, tensor_of
from moe_compile.ops.gathered_rows import LOCAL_ROWS, SLICE_COUNTS
from moe_compile.regions.new_order import parts
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.rewrites import Effects
from moe_compile.regions.token_regions import GatheredForm, TokenRows
from passes.replay.host_reads import BulkRead, Size, extent, times
from passes.replay.replayed import (
    Replay,
    changed_rows,
    emit_rest,
    emit_until_reads,
    needed_for,
    weights_of_rows,
)

ON_THE_WIRE: Final = torch.int32
"""Type of counts and token numbers on the wire: a rank has fewer than 2**31 rows."""


@dataclass(frozen=True, slots=True)
class GatheredRouting:
    """The routing of all ranks."""

    counts: tuple[fx.Node, ...]
    """Counts of each slice, `[ranks, experts]`."""
    tokens: tuple[fx.Node, ...]
    """Tokens of each slice, `[ranks, rows of a rank]`: number of a row's token in its slice."""
    num_rows: Size
    """Rows that one rank has in one slice."""
    by_slice: fx.Node | None
    """Order of this rank's rows by slice; None for one slice."""


def emit_gather(emit: Emitter, region: MoERegion, tensor: fx.Node) -> fx.Node:
    """Launch the gather of all ranks' `tensor` along its first dimension."""
    whole = emit.method("contiguous", tensor)
    return emit.call(C10D.all_gather_into_tensor, whole, region.num_ranks, region.group)


def emit_routing(
    emit: Emitter, region: MoERegion, found: TokenRows, num_slices: int
) -> GatheredRouting:
    """Emit the exchange of counts and of rows' tokens; its inputs stand before `emit`."""
    num_experts = region.num_ranks * region.num_local_experts
    counts = emit.method("to", emit.method("reshape", region.counts, -1), torch.int64)
    index, by_slice = found.index, None
    num_rows = extent(emit, index, 0)
    if num_slices > 1:
        num_tokens = extent(emit, found.tokens, 0)
        assert isinstance(num_rows, int) and isinstance(num_tokens, int)  # as the pass has checked
        num_rows, num_tokens = num_rows // num_slices, num_tokens // num_slices
        slice_of_row = emit.call(operator.floordiv, index, num_tokens)
        by_slice = emit.call(torch.argsort, slice_of_row, stable=True)
        counts = emit.method("reshape", emit.call(SLICE_COUNTS, counts, by_slice, num_slices), -1)
        index = emit.call(operator.getitem, index, by_slice)
        index = emit.call(operator.mod, index, num_tokens)
    parts = [emit.method("to", part, ON_THE_WIRE) for part in (counts, index)]
    launch = emit_gather(emit, region, emit.call(torch.cat, parts))
    table = emit.method("view", emit.call(C10D.wait_tensor, launch), region.num_ranks, -1)
    table = emit.method("to", table, torch.int64)
    behind = num_slices * num_experts
    columns = (
        emit.call(operator.getitem, table, (slice(None), part))
        for part in (slice(None, behind), slice(behind, None))
    )
    shapes = ((region.num_ranks, num_slices, width) for width in (num_experts, num_rows))
    counted, tokens = (emit.method("reshape", c, *s) for c, s in zip(columns, shapes, strict=True))
    return GatheredRouting(
        counts=_slices(emit, counted, num_slices),
        tokens=_slices(emit, tokens, num_slices),
        num_rows=num_rows,
        by_slice=by_slice,
    )


def _slices(emit: Emitter, everyone: fx.Node, num_slices: int) -> tuple[fx.Node, ...]:
    """Emit each slice of `[ranks, slices, ...]`."""
    every = slice(None)
    return tuple(emit.call(operator.getitem, everyone, (every, c)) for c in range(num_slices))


def emit_factor(
    emit: Emitter, region: MoERegion, routing: GatheredRouting, factor: fx.Node
) -> tuple[fx.Node, ...]:
    """Emit the gather of a factor per row `[R, 1]`; return each slice's, `[ranks * rows, 1]`."""
    if routing.by_slice is not None:
        factor = emit.call(operator.getitem, factor, routing.by_slice)
    everyone = emit.call(C10D.wait_tensor, emit_gather(emit, region, factor))
    num_slices = len(routing.counts)
    shape = (region.num_ranks, num_slices, routing.num_rows)
    slices = _slices(emit, emit.method("view", everyone, *shape), num_slices)
    return tuple(emit.method("reshape", part, -1, 1) for part in slices)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The new form of a region."""

    result: fx.Node
    """The sums of this rank's tokens, which replace the sum per token."""
    instead: dict[fx.Node, fx.Node]
    """Host read whose value the graph needs outside the region -> its replacement."""
    gathers: tuple[fx.Node, ...]
    reduces: tuple[fx.Node, ...]
    """Launches that move the tokens, and the sums, of each slice."""
    routing: frozenset[fx.Node]
    """Nodes that share all ranks' routing: once for all slices."""


def emit_gathered(form: GatheredForm, effects: Effects, rank: int) -> Gathered:
    """Emit the region in its new form for a rank; the caller removes the old one.

    `effects` names the host reads of the region that others need and that the one read serves.
    """
    region, found = form.region, form.found
    gathers = _launch_tokens(form)
    emit = Emitter(region.result)
    before = set(emit.graph.nodes)
    routing = emit_routing(emit, region, found, form.num_slices)
    if type(routing.num_rows) is int:
        note_nominal_rows(gathers, routing.num_rows)
    told = frozenset(node for node in emit.graph.nodes if node not in before)
    writer = SliceWriter(emit, form, routing, rank)
    slices = [writer.begin(c, launch) for c, launch in enumerate(gathers)]
    instead = _read_host(writer, form, routing, slices, effects)
    for part in slices:
        writer.place_rows(part)
    writer.gather_factors(slices, found.before)
    for part in slices:
        writer.run_experts(part)
    writer.emit = Emitter(found.sums.total)
    writer.gather_factors(slices, found.after)
    writer.gather_weights(slices)
    reduces = [writer.launch_sums(part) for part in slices]
    result = _joined(writer.emit, form, reduces)
    return Gathered(result, instead, tuple(gathers), tuple(reduces), told)


def _launch_tokens(form: GatheredForm) -> list[fx.Node]:
    """Gather the tokens where the rows were gathered: gradients meet in the order they had."""
    emit, tokens = Emitter(form.found.gather), form.found.tokens
    parts = [tokens]
    if form.num_slices > 1:
        share = extent(emit, tokens, 0)
        assert isinstance(share, int)
        split = emit.call(torch.split, tokens, share // form.num_slices)
        parts = [emit.call(operator.getitem, split, c) for c in range(form.num_slices)]
    return [emit_gather(emit, form.region, part) for part in parts]


def _read_host(
    writer: SliceWriter,
    form: GatheredForm,
    routing: GatheredRouting,
    slices: list[Slice],
    effects: Effects,
) -> dict[fx.Node, fx.Node]:
    """Emit the one read of all integers the host needs; return the served reads' replacements."""
    emit, region = writer.emit, form.region
    reads = BulkRead(emit)
    for counts in routing.counts:
        reads.add(emit.method("sum", writer.mine(counts)))
    whole = Replay(range(region.num_local_experts), {})
    part_of = parts(region, effects.bulk)
    if effects.served:
        counts = emit.method("sum", emit.call(torch.stack, list(routing.counts)), 0)
        whole.env[region.received_counts] = writer.received(counts)
        needed = needed_for(effects.served, region)
        emit_until_reads(emit, region, whole, reads, part_of, needed)
    wanted = needed_for(effects.bulk, region) & set(form.needs.nodes)
    for part in slices:
        emit_until_reads(emit, region, part.replay, reads, part_of, wanted)
    values = reads.finish()
    for replay in (whole, *(part.replay for part in slices)):
        replay.env.update({n: values[i] for n, i in reads.asked_by(replay).items()})
    for part, num_rows in zip(slices, values, strict=False):
        writer.set_num_rows(part, num_rows)
    return {node: whole.env[node] for node in effects.served}


def _joined(emit: Emitter, form: GatheredForm, reduces: list[fx.Node]) -> fx.Node:
    """Emit the sums of all this rank's tokens, added to the model's own addend."""
    sums = [emit.call(C10D.wait_tensor, launch) for launch in reduces]
    result = sums[0] if len(sums) == 1 else emit.call(torch.cat, sums)
    if form.found.sums.base is not None:
        result = emit.call(operator.add, form.found.sums.base, result)
    return result


@dataclass(slots=True)
class Slice:
    """One slice of the tokens."""

    number: int
    tokens: fx.Node
    """Its tokens of all ranks, `[ranks * T, D]`."""
    replay: Replay
    num_rows: Size = 0
    """Rows that this rank has."""
    source: fx.Node | None = None
    """Number of each row among the rows of all ranks."""
    target: fx.Node | None = None
    """Number of each row's token among the tokens of all ranks."""
    factors: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Factor per row of the model -> the factor of this rank's rows."""


class SliceWriter:
    """Emits the parts of slices, through an emitter that moves down the graph."""

    def __init__(
        self, emit: Emitter, form: GatheredForm, routing: GatheredRouting, rank: int
    ) -> None:
        """Write the form `form` of the rows that `routing` gives, for one rank of the group."""
        self.emit, self._form, self._routing = emit, form, routing
        self._region, self._found = form.region, form.found
        self._first = rank * self._region.num_local_experts

    def begin(self, number: int, launch: fx.Node) -> Slice:
        """Emit the nodes of a slice that need no host read."""
        tokens = self.emit.call(C10D.wait_tensor, launch)
        part = Slice(number, tokens, Replay(range(self._region.num_local_experts), {}))
        part.replay.env[self._region.received_counts] = self.received(self._routing.counts[number])
        return part

    def set_num_rows(self, part: Slice, num_rows: Size) -> None:
        """Set the number of the slice's rows, wherever the experts read it."""
        part.num_rows = num_rows
        part.replay.env.update(dict.fromkeys(self._form.needs.num_rows, num_rows))

    def _num_tokens(self) -> Size:
        size = extent(self.emit, self._found.tokens, 0)
        return size // self._form.num_slices if isinstance(size, int) else size

    def received(self, counts: fx.Node) -> fx.Node:
        """Emit `[ranks, experts]` counts in the form in which the region receives its own."""
        tensor = tensor_of(self._region.received_counts)
        assert tensor is not None
        if tensor.numel() == self._region.num_ranks * self._region.num_local_experts:
            counts = self.mine(counts)  # or the region receives all ranks'
        shaped = self.emit.method("reshape", counts, list(tensor.shape))
        return self.emit.method("to", shaped, tensor.dtype)

    def mine(self, counts: fx.Node) -> fx.Node:
        """Emit the counts of this rank's experts, `[ranks, local experts]`."""
        experts = slice(self._first, self._first + self._region.num_local_experts)
        return self.emit.call(operator.getitem, counts, (slice(None), experts))

    def place_rows(self, part: Slice) -> None:
        """Emit the numbers of the slice's rows, and of their tokens."""
        emit, routing, local = self.emit, self._routing, self._region.num_local_experts
        counts = routing.counts[part.number]
        sizes = (part.num_rows, routing.num_rows)
        part.source = emit.call(LOCAL_ROWS, counts, self._first, local, *sizes)
        of_sender = emit.method("reshape", routing.tokens[part.number], -1)
        token = emit.call(operator.getitem, of_sender, part.source)
        sender = emit.call(operator.floordiv, part.source, routing.num_rows)
        ahead = emit.call(operator.mul, sender, self._num_tokens())
        part.target = emit.call(operator.add, token, ahead)

    def gather_factors(self, slices: list[Slice], readers: Iterable[fx.Node]) -> None:
        """Emit, for this rank's rows, each factor that `readers` read, once for all its readers."""
        read = [i for node in readers for i in node.all_input_nodes if i in self._found.factors]
        for factor in dict.fromkeys(read):
            if factor in slices[0].factors:
                continue
            self._gather(slices, factor, factor)

    def gather_weights(self, slices: list[Slice]) -> None:
        """Emit, for this rank's rows, the weights of a weighted sum, which are stored by token."""
        sums = self._found.sums
        if sums.weights is None:
            return
        self._gather(slices, sums.weights, weights_of_rows(self.emit, sums))

    def _gather(self, slices: list[Slice], name: fx.Node, factor: fx.Node) -> None:
        everyone = emit_factor(self.emit, self._region, self._routing, factor)
        for part, own in zip(slices, everyone, strict=True):
            part.factors[name] = self.emit.call(operator.getitem, own, part.source)

    def run_experts(self, part: Slice) -> None:
        """Emit the rows of the slice, and the region's body on them."""
        rows = self.emit.call(operator.getitem, part.tokens, part.target)
        before = self._found.before
        rows = changed_rows(self.emit, self._found.gather, rows, before, part.factors)
        env = part.replay.env
        env.update(dict.fromkeys(self._form.needs.received, rows))
        emit_rest(self.emit, self._form.needs.nodes, part.replay)

    def launch_sums(self, part: Slice) -> fx.Node:
        """Emit the sums per token of all ranks, and launch the reduce-scatter that adds them up."""
        emit, region, found = self.emit, self._region, self._found
        sent = region.combine.all_input_nodes[0]
        rows = part.replay.env.get(sent, sent)
        rows = changed_rows(emit, region.result, rows, found.after, part.factors)
        if (weights := found.sums.weights) is not None:
            wide = tensor_of(weights)
            assert wide is not None
            rows = emit.method("to", rows, wide.dtype)
            rows = emit.call(operator.mul, rows, part.factors[weights])
        all_tokens = times(emit, self._num_tokens(), region.num_ranks)
        zeros = emit.method("new_zeros", rows, (all_tokens, extent(emit, found.sums.total, 1)))
        sums = emit.method("index_add", zeros, 0, part.target, rows)
        total = tensor_of(found.sums.total)
        assert total is not None
        sums = emit.method("to", sums, total.dtype)
        return emit.call(C10D.reduce_scatter_tensor, sums, "sum", region.num_ranks, region.group)
