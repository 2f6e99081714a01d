"""Run a MoE region N times, each time on the rows and counts of one chunk.

Contract
    Requires  a proof that the region's experts treat rows independently given the counts, and
              that nothing around it depends on when it runs, which is at its result.
    Keeps     every value the graph has outside the region, bit for bit; every side effect.
    Order     all counts and one bulk host read where the region's own last read stands, so that
              readers of its integers stay in place; at the region's result all dispatch
              launches, then per chunk: wait, experts, combine.

A region is f(rows, counts). The same nodes run once per chunk on the chunk's rows and on the
chunk's part of the counts; a correct region is right for any counts, so nothing need be known
about the experts. Exchanging counts and taking parts of them commute (chunk_axis.py), so the one
count exchange serves all chunks. The experts of a chunk may follow from the counts of all ranks
(chunk_axis.py): the host reads their number beside the sizes, and weights are split by it.

Rows sorted by expert are sorted by chunk instead. The order is stable: rows of one run, an expert's
or a chunk's share of it, stay together and in order. It is computed from the counts by two searches
in sorted ends of runs; no sort of the rows. Every place lies within the rows, even for counts that
do not fit them: rows may be moved before the host has read the counts, and it is the assertion
about them that must report the error.

Worked example: counts [2, 1, 1, 2] of experts 0..3, two ranks of two, chunks [0, 1, 0, 1].
Runs start at [0, 2, 3, 4]; by chunk the experts stand as [0, 2, 1, 3], their runs start at
[0, 2, 3, 4] with lengths [2, 1, 1, 2]; order = [0, 1, 3, 2, 4, 5].

`AutocastEmitter` emits nodes under the autocast of the place where they stand.
A copy runs under the autocast of its original; neighbours under the same one share it. Other
nodes run under the modes of the place where they are emitted.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.modes import Mode, entered_since
from moe_compile.graph.query import tensor_of
from moe_compile.ops.permute import PERMUTE_ROWS
from moe_compile.regions.regions import MoERegion, RowProof
from moe_compile.regions.rewrites import Effects
from passes.replay.chunk_axis import (
    ChunkAxis,
    slice_by_load,
    slice_to_chunk,
    split_by_experts,
    split_by_load,
    split_by_tokens,
    split_weights,
)
from passes.replay.chunk_reads import read_chunks
from passes.replay.host_reads import ASSERT, SPLITS_DO_NOT_FIT
from passes.replay.prune import prune_other_experts
from passes.replay.replayed import Replay, emit_rest


def chunk_bounds(num_local_experts: int, num_chunks: int) -> list[range]:
    """Return the local experts of each chunk; sizes differ by at most one.

    Expert e belongs to chunk `e * num_chunks // num_local_experts`.
    """
    edges = [-(-c * num_local_experts // num_chunks) for c in range(num_chunks + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


@dataclass(frozen=True, slots=True)
class Chunked:
    """The new form of a region."""

    instead: dict[fx.Node, fx.Node]
    """Result of the region, or host read that the graph needs outside it -> its replacement."""
    dispatches: tuple[fx.Node, ...]
    combines: tuple[fx.Node, ...]
    """Launches of each chunk's dispatch and combine, in order of chunks."""


def emit_chunks(
    region: MoERegion,
    proof: RowProof,
    num_chunks: int,
    effects: Effects,
    *,
    by_tokens: bool = False,
    rank_by_load: int | None = None,
) -> Chunked:
    """Emit the region in `num_chunks` chunks before its result.

    `effects` says where the host reads, and which host reads of the region others need: they join
    the bulk read. A chunk holds whole experts or, `by_tokens`, a share of each's rows. With
    `rank_by_load`, which is this rank, its experts follow from the rows they have.
    The region's old nodes stay, for the caller to replace and to erase.
    """
    modes = region.facts.modes
    early, emit = AutocastEmitter(effects.read_at, modes), AutocastEmitter(region.result, modes)
    by_load = rank_by_load is not None
    axis = _split(early, region, num_chunks, by_tokens, rank_by_load)
    bounds = experts_of_chunks(region, num_chunks, by_tokens=by_tokens, by_load=by_load)
    replays = [
        Replay(experts, env, prune_other_experts(region, proof, experts))
        for env, experts in zip(axis.inputs, bounds, strict=True)
    ]
    whole = Replay(range(region.num_local_experts), {})
    others = None if axis.num_experts is None else (axis.num_experts, num_chunks)
    reads = read_chunks(early, region, whole, replays, effects, others=others)
    rows_per_chunk, sizes = reads.sent, reads.others or [len(chunk) for chunk in bounds]

    order, inverse = emit_row_order(emit, region, axis, rows_per_chunk)
    parts = {
        sent: emit.call(torch.split, emit.call(PERMUTE_ROWS, sent, order, inverse), rows_per_chunk)
        for sent in dict.fromkeys(one.sent for one in region.dispatched)
    }
    sliceable = () if by_tokens else proof.sliceable
    weights = split_weights(emit, sliceable, sizes)
    for c, replay in enumerate(replays):
        for sent, pieces in parts.items():
            replay.env[sent] = emit.call(operator.getitem, pieces, c)
        emit_rest(emit, region.count_side, replay)
    for replay in replays:
        for one in region.dispatched:
            replay.env[one.launch] = emit.copy(one.launch, replay.env)
    for c, replay in enumerate(replays):
        own = {gemm: weights[gemm][c] for gemm in sliceable}
        if by_load:
            slice_by_load(emit, proof, own, sizes, c, replay)
        else:
            slice_to_chunk(emit, region, proof, own, replay)
        emit_rest(emit, region.row_side, replay)

    instead = {node: whole.env[node] for node in effects.served}
    for node in region.results:
        instead[node] = emit_results(emit, node, replays, order, inverse)
    return Chunked(
        instead=instead,
        dispatches=tuple(replay.env[region.dispatch] for replay in replays),
        combines=tuple(replay.env[region.combine] for replay in replays),
    )


def _split(
    emit: Emitter, region: MoERegion, num_chunks: int, by_tokens: bool, rank_by_load: int | None
) -> ChunkAxis:
    if rank_by_load is not None:
        return split_by_load(emit, region, num_chunks, rank_by_load)
    return (split_by_tokens if by_tokens else split_by_experts)(emit, region, num_chunks)


def emit_results(
    emit: Emitter, result: fx.Node, replays: Sequence[Replay], order: fx.Node, inverse: fx.Node
) -> fx.Node:
    """Emit the rows returned to all chunks, in the order in which they return to the region."""
    rows = emit.call(PERMUTE_ROWS, _joined(emit, result, replays), inverse, order)
    rows.meta.update(result.meta)  # later passes read its sizes
    return rows


def _joined(emit: Emitter, result: fx.Node, replays: Sequence[Replay]) -> fx.Node:
    """Return the rows returned to all chunks, one chunk after another.

    Rows of one number get a column for it: autograd gives an empty vector in a concatenation a
    gradient of zeros that depends on nothing, so the exchange of that gradient would leave the
    backward pass, on a rank without tokens alone.
    """
    parts, rows = [replay.env[result] for replay in replays], tensor_of(result)
    if rows is None or rows.dim() > 1:
        return emit.call(torch.cat, parts)
    columns = [emit.method("unsqueeze", part, 1) for part in parts]
    return emit.method("squeeze", emit.call(torch.cat, columns), 1)


def experts_of_chunks(
    region: MoERegion, num_chunks: int, *, by_tokens: bool, by_load: bool = False
) -> list[range]:
    """Return the local experts that each chunk may have rows of: by tokens and by load, all."""
    if by_tokens or by_load:
        return [range(region.num_local_experts)] * num_chunks
    return chunk_bounds(region.num_local_experts, num_chunks)


class AutocastEmitter(Emitter):
    """Appends nodes before `anchor`, copies under the autocast of their originals."""

    def __init__(self, anchor: fx.Node, modes: Mapping[fx.Node, Mode]) -> None:
        """Begin without autocast; `modes` has all nodes that may be copied."""
        super().__init__(anchor)
        self._modes = modes
        self._open: list[tuple[fx.Node, fx.Node]] = []

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of a function or operator."""
        self._switch(())
        return super().call(target, *args, **kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of the tensor method `name`; the tensor is the first argument."""
        self._switch(())
        return super().method(name, *args, **kwargs)

    def copy(self, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        """Emit `node` again, under its autocast, reading `env[input]` where env has the input."""
        self._switch(entered_since(self._modes[node], self._modes[self.anchor]) or ())
        return super().copy(node, env)

    def _switch(self, wanted: tuple[fx.Node, ...]) -> None:
        """Leave and enter autocast until only the contexts of `wanted` are in force."""
        if tuple(entered for entered, _ in self._open) == wanted:
            return
        while self._open:
            _, ours = self._open.pop()
            super().call(torch.amp.autocast_mode._exit_autocast, ours)
        for switch in wanted:
            self._open.append((switch, super().copy(switch, {})))


def emit_row_order(
    emit: Emitter, region: MoERegion, axis: ChunkAxis, rows_per_chunk: list[fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """Emit the stable order of the rows by chunk, and its inverse, each `[R]`."""
    counts = tensor_of(region.counts)
    assert counts is not None
    num_rows = assert_all_are_sent(emit, region, rows_per_chunk)
    for other in dict.fromkeys(one.sent for one in region.beside):
        is_alike = emit.call(operator.eq, emit.method("size", other, 0), num_rows)
        emit.call(
            ASSERT,
            is_alike,
            "a tensor that is sent with the rows must have one entry for each row, and has not",
        )
    rows = emit.call(torch.arange, num_rows, device=counts.device)
    by_chunk = emit.call(torch.argsort, axis.chunk_of_run, stable=True)
    ends = _runs(emit, axis.run_counts)
    moved = _runs(emit, emit.call(operator.getitem, ends.counts, by_chunk))
    back = emit.call(operator.getitem, moved.starts, emit.call(torch.argsort, by_chunk))
    there = emit.call(operator.getitem, ends.starts, by_chunk)
    order = _shifted(emit, rows, moved, emit.call(operator.sub, there, moved.starts))
    return order, _shifted(emit, rows, ends, emit.call(operator.sub, back, ends.starts))


def assert_all_are_sent(emit: Emitter, region: MoERegion, sent: list[fx.Node]) -> fx.Node:
    """Emit the check that all rows are sent; return their number."""
    num_rows = emit.method("size", region.rows, 0)
    total = emit.call(torch.sym_sum, sent)
    emit.call(ASSERT, emit.call(operator.eq, total, num_rows), SPLITS_DO_NOT_FIT)
    return num_rows


@dataclass(frozen=True, slots=True)
class _Runs:
    """Rows that lie in runs: the number, the start and the end of each run."""

    counts: fx.Node
    starts: fx.Node
    ends: fx.Node


def _runs(emit: Emitter, counts: fx.Node) -> _Runs:
    ends = emit.call(torch.cumsum, counts, 0)
    return _Runs(counts, emit.call(operator.sub, ends, counts), ends)


def _shifted(emit: Emitter, rows: fx.Node, runs: _Runs, shifts: fx.Node) -> fx.Node:
    """Emit each row's index plus the shift of the run the row lies in."""
    found = emit.call(torch.searchsorted, runs.ends, rows, right=True)
    run = _kept_within(emit, found, runs.ends)
    shifted = emit.call(operator.add, rows, emit.call(operator.getitem, shifts, run))
    return _kept_within(emit, shifted, rows)


def _kept_within(emit: Emitter, places: fx.Node, within: fx.Node) -> fx.Node:
    last = emit.call(operator.sub, emit.method("size", within, 0), 1)
    return emit.call(torch.clamp, places, 0, last)
