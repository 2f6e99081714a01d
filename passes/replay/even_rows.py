"""Run a MoE region without a read by the host: rows travel in buffers with room for each rank.

Contract
    Requires  that the experts take rows behind those that the counts tell of, and that nothing
              outside the region needs an integer that the host reads of it.
    Keeps     where all rows have room, the experts' rows, their order and the rows that come back.
    Notes     two numbers of the device: 1 where rows of this rank have no room, or the counts are
              not those of the rows; and the room that the rows need. All other values may be wrong
              where the first is 1, and are finite wherever the program's are.
    Splits of all exchanges are equal and known when compiling. The experts get the rows that came
    first, in the order in which an uneven exchange brings them, and padding behind them. Padding
    is read by nobody, neither on the way nor backward.
    A chunk has a share of every expert's rows, as in chunks of tokens with reads
    (`chunk_axis.py`), and runs the experts on the same rows as there.

The room of a chunk is an equal slice of the room. Shares are rounded, for each expert by less than
one row, so that a slice is longer than the room over the chunks by up to that: rows that have room
in one chunk have it in several.

Pseudo-code
    slots of the rows sent = their chunk, their rank's slice + their place among its rows there
    rows -> slots -> an even all-to-all for each chunk, all launched first
    for each chunk:
        rows that came, padding behind
        the region's body on those, with the counts of the chunk's rows that had room
        rows made -> slots -> even all-to-all
    what came of all chunks -> rows in the order of those sent
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D, known_rows, tensor_of
from moe_compile.ops.room_rows import COUNTS_WITHIN, MOVE_ROWS, ROOM_INDEX
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.token_regions import EvenForm
from moe_compile.runtime.rerun import NEED_UNIT
from passes.replay.chunk_axis import shares_of
from passes.replay.masked_replay import AutocastEmitter
from passes.replay.replayed import Replay, emit_rest


@dataclass(frozen=True, slots=True)
class Even:
    """The new form of a region."""

    result: fx.Node
    dispatches: tuple[fx.Node, ...]
    combines: tuple[fx.Node, ...]
    """Launches of each chunk's dispatch and combine, in order of chunks."""
    overflow: fx.Node
    """Two int32 on the device: 1 where the values are wrong for want of room, and the least factor
    of an even share with which all rows have room, in parts of `NEED_UNIT`, rounded up."""


def room_of(region: MoERegion, factor: float) -> int:
    """Return the rows that a rank may send to one rank: `factor` times an even share of its rows.

    Raises ValueError where the number of rows is not known when compiling.
    """
    if not (num_rows := known_rows(region.rows)):
        raise ValueError("rows of unknown number")
    return min(num_rows, math.ceil(factor * num_rows / region.num_ranks))


def emit_even(form: EvenForm) -> Even:
    """Emit the region before its result."""
    region, num = form.region, form.num_chunks
    emit = AutocastEmitter(region.result, region.facts.modes)
    num_rows = known_rows(region.rows)
    assert num_rows
    sent, came = (_by_rank(emit, region, n) for n in (region.counts, region.received_counts))
    of_ranks = emit.method("sum", sent, 1)
    chunks = [_shares(emit, counts, num) for counts in (sent, came)]
    runs = emit.method("reshape", of_ranks, -1, 1, 1)
    if num > 1:
        runs = emit.call(torch.stack, chunks[0], -1)
    there = _Buffer.of(emit, runs, form.slice_room, num_rows)
    pieces = _pieces(emit, form, there.filled(emit, region.rows))
    dispatches = tuple(_launch(emit, form, piece) for piece in pieces)
    combines = tuple(
        _experts(emit, form, launch, *counts)
        for launch, *counts in zip(dispatches, *chunks, strict=True)
    )
    back = [emit.call(C10D.wait_tensor, launch) for launch in combines]
    result = there.taken_out(emit, back[0] if num == 1 else emit.call(torch.cat, back))
    _note_rows(result, region, num_rows)
    overflow = _overflow(emit, of_ranks, form.room, num_rows, region.num_ranks)
    return Even(result, dispatches, combines, overflow)


def _by_rank(emit: Emitter, region: MoERegion, counts: fx.Node) -> fx.Node:
    """Emit counts as `[ranks, experts of one]`."""
    shape = (region.num_ranks, region.num_local_experts)
    return emit.method("to", emit.method("reshape", counts, *shape), torch.int64)


def _shares(emit: Emitter, counts: fx.Node, num_chunks: int) -> list[fx.Node]:
    return [counts] if num_chunks == 1 else shares_of(emit, counts, num_chunks)


def _pieces(emit: Emitter, form: EvenForm, buffer: fx.Node) -> list[fx.Node]:
    """Emit the part of each chunk of the buffer of all."""
    if form.num_chunks == 1:
        return [buffer]
    pieces = emit.call(torch.split, buffer, form.region.num_ranks * form.slice_room)
    return [emit.call(operator.getitem, pieces, chunk) for chunk in range(form.num_chunks)]


def _launch(emit: Emitter, form: EvenForm, buffer: fx.Node) -> fx.Node:
    """Emit the launch of one exchange."""
    splits = [form.slice_room] * form.region.num_ranks
    return emit.call(C10D.all_to_all_single, buffer, splits, splits, form.region.group)


def _experts(
    emit: AutocastEmitter, form: EvenForm, launch: fx.Node, sent: fx.Node, came: fx.Node
) -> fx.Node:
    """Emit the experts on the rows of a chunk, so many sent and come; return the launch back."""
    region, needs = form.region, form.needs
    num_slots = region.num_ranks * form.slice_room
    within = emit.call(COUNTS_WITHIN, came, form.slice_room)
    of_ranks = emit.method("reshape", emit.method("sum", within, 1), -1, 1, 1)
    here = _Buffer.of(emit, of_ranks, form.slice_room, num_slots)
    replay = Replay(range(region.num_local_experts), {})
    rows = here.taken_out(emit, emit.call(C10D.wait_tensor, launch))
    replay.env |= dict.fromkeys(needs.received, rows)
    replay.env |= dict.fromkeys(needs.num_rows, num_slots)
    replay.env[region.received_counts] = _shaped(emit, within, region.received_counts)
    if region.counts in {i for node in needs.nodes for i in node.all_input_nodes}:
        own = emit.call(COUNTS_WITHIN, sent, form.slice_room)
        replay.env[region.counts] = _shaped(emit, own, region.counts)
    emit_rest(emit, needs.nodes, replay)
    made = replay.env[region.combine.all_input_nodes[0]]
    return _launch(emit, form, here.filled(emit, made))


def _shaped(emit: Emitter, counts: fx.Node, like: fx.Node) -> fx.Node:
    tensor = tensor_of(like)
    assert tensor is not None
    return emit.method("to", emit.method("reshape", counts, list(tensor.shape)), tensor.dtype)


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Rows that lie in runs, and the buffer in which they travel."""

    slots: fx.Node
    """Slot of each row."""
    rows: fx.Node
    """Row of each slot."""

    @staticmethod
    def of(emit: Emitter, runs: fx.Node, room: int, num_rows: int) -> _Buffer:
        both = emit.call(ROOM_INDEX, runs, room, num_rows)
        return _Buffer(*(emit.call(operator.getitem, both, i) for i in range(2)))

    def filled(self, emit: Emitter, rows: Any) -> fx.Node:
        """Emit the buffer that has the rows in their slots."""
        return emit.call(MOVE_ROWS, rows, self.rows, self.slots)

    def taken_out(self, emit: Emitter, buffer: fx.Node) -> fx.Node:
        """Emit the rows of a buffer that came."""
        return emit.call(MOVE_ROWS, buffer, self.slots, self.rows)


def _overflow(
    emit: Emitter, of_ranks: fx.Node, room: int, num_rows: int, num_ranks: int
) -> fx.Node:
    most = emit.method("amax", of_ranks)
    has_none = emit.call(operator.gt, most, room)
    other = emit.call(operator.ne, emit.method("sum", of_ranks), num_rows)
    has_none = emit.call(operator.or_, has_none, other)
    shares = emit.call(operator.mul, most, num_ranks * NEED_UNIT)
    needed = emit.call(operator.floordiv, emit.call(operator.add, shares, num_rows - 1), num_rows)
    return emit.call(torch.stack, [emit.method("to", n, torch.int32) for n in (has_none, needed)])


def _note_rows(result: fx.Node, region: MoERegion, num_rows: int) -> None:
    """Give the result the form of the region's, of rows whose number is known; passes read it."""
    result.meta.update(region.result.meta)
    result.meta.pop("unbacked_bindings", None)
    if (rows := tensor_of(region.result)) is not None:
        result.meta["example_value"] = rows.new_empty((num_rows, *rows.shape[1:]))
