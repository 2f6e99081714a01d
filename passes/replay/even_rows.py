"""Run a MoE region without a read by the host: rows travel in buffers with room for each rank.

Contract
    Requires  that the experts take rows behind those that the counts tell of, and that nothing
              outside the region needs an integer that the host reads of it.
    Keeps     where all rows have room, the experts' rows, their order and the rows that come back.
    Notes     where rows of this rank have no room, or the counts are not those of the rows: a
              number of the device that is 1. All other values may be wrong then, and are finite
              wherever the program's are.
    Splits of both exchanges are equal and known when compiling. The experts get the rows that came
    first, in the order in which an uneven exchange brings them, and padding behind them. Padding
    is read by nobody, neither on the way nor backward.

Pseudo-code
    slots of the rows sent = their rank's room + their place among its rows
    rows -> slots -> even all-to-all -> rows that came, padding behind
    the region's body on those, with the counts of rows that had room
    rows made -> slots -> even all-to-all -> rows in the order of those sent
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
from passes.replay.masked_replay import AutocastEmitter
from passes.replay.replayed import Replay, emit_rest


@dataclass(frozen=True, slots=True)
class Even:
    """The new form of a region."""

    result: fx.Node
    dispatch: fx.Node
    combine: fx.Node
    overflow: fx.Node
    """One int32 on the device: 1 where the values are wrong for want of room."""


def room_of(region: MoERegion, factor: float) -> int:
    """Return the rows that a rank may send to one rank: `factor` times an even share of its rows.

    Raises ValueError where the number of rows is not known when compiling.
    """
    if not (num_rows := known_rows(region.rows)):
        raise ValueError("rows of unknown number")
    return min(num_rows, math.ceil(factor * num_rows / region.num_ranks))


def emit_even(form: EvenForm) -> Even:
    """Emit the region before its result."""
    region, needs, room = form.region, form.needs, form.room
    emit = AutocastEmitter(region.result, region.facts.modes)
    num_rows = known_rows(region.rows)
    assert num_rows
    sent, came = (_by_rank(emit, region, n) for n in (region.counts, region.received_counts))
    of_ranks = emit.method("sum", sent, 1)
    there = _Buffer.of(emit, region, of_ranks, room, num_rows)
    launch, rows = there.travel(emit, region.rows, region)
    within = emit.call(COUNTS_WITHIN, came, room)
    here = _Buffer.of(emit, region, emit.method("sum", within, 1), room, region.num_ranks * room)
    replay = Replay(range(region.num_local_experts), {})
    replay.env |= dict.fromkeys(needs.received, here.taken_out(emit, rows))
    replay.env |= dict.fromkeys(needs.num_rows, region.num_ranks * room)
    replay.env[region.received_counts] = _shaped(emit, within, region.received_counts)
    if region.counts in {i for node in needs.nodes for i in node.all_input_nodes}:
        own = emit.call(COUNTS_WITHIN, sent, room)
        replay.env[region.counts] = _shaped(emit, own, region.counts)
    emit_rest(emit, needs.nodes, replay)
    made = replay.env[region.combine.all_input_nodes[0]]
    combine, back = here.travel(emit, made, region)
    result = there.taken_out(emit, back)
    _note_rows(result, region, num_rows)
    return Even(result, launch, combine, _overflow(emit, of_ranks, room, num_rows))


def _by_rank(emit: Emitter, region: MoERegion, counts: fx.Node) -> fx.Node:
    """Emit counts as `[ranks, experts of one]`."""
    shape = (region.num_ranks, region.num_local_experts)
    return emit.method("to", emit.method("reshape", counts, *shape), torch.int64)


def _shaped(emit: Emitter, counts: fx.Node, like: fx.Node) -> fx.Node:
    tensor = tensor_of(like)
    assert tensor is not None
    return emit.method("to", emit.method("reshape", counts, list(tensor.shape)), tensor.dtype)


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Rows that lie one rank after another, and the buffer in which they travel."""

    slots: fx.Node
    """Slot of each row."""
    rows: fx.Node
    """Row of each slot."""
    splits: list[int]

    @staticmethod
    def of(emit: Emitter, region: MoERegion, counts: fx.Node, room: int, num_rows: int) -> _Buffer:
        both = emit.call(ROOM_INDEX, counts, room, num_rows)
        slots, rows = (emit.call(operator.getitem, both, i) for i in range(2))
        return _Buffer(slots, rows, [room] * region.num_ranks)

    def travel(self, emit: Emitter, rows: Any, region: MoERegion) -> tuple[fx.Node, fx.Node]:
        """Emit the exchange of `rows`; return its launch, and the buffer that came."""
        buffer = emit.call(MOVE_ROWS, rows, self.rows, self.slots)
        way = (self.splits, self.splits, region.group)
        launch = emit.call(C10D.all_to_all_single, buffer, *way)
        return launch, emit.call(C10D.wait_tensor, launch)

    def taken_out(self, emit: Emitter, buffer: fx.Node) -> fx.Node:
        """Emit the rows of a buffer that came."""
        return emit.call(MOVE_ROWS, buffer, self.slots, self.rows)


def _overflow(emit: Emitter, of_ranks: fx.Node, room: int, num_rows: int) -> fx.Node:
    most = emit.call(operator.gt, emit.method("amax", of_ranks), room)
    other = emit.call(operator.ne, emit.method("sum", of_ranks), num_rows)
    return emit.method("to", emit.call(operator.or_, most, other), torch.int32)


def _note_rows(result: fx.Node, region: MoERegion, num_rows: int) -> None:
    """Give the result the form of the region's, of rows whose number is known; passes read it."""
    result.meta.update(region.result.meta)
    result.meta.pop("unbacked_bindings", None)
    if (rows := tensor_of(region.result)) is not None:
        result.meta["example_value"] = rows.new_empty((num_rows, *rows.shape[1:]))
