"""Where each row goes when rows sorted by expert are sorted by chunk instead.

Contract
    Stable: rows of one run, an expert's or a chunk's share of it, stay together and in order.
    Computed from the counts by two searches in sorted ends of runs; no sort of the rows.
    Every place lies within the rows, for counts that do not fit them too: rows may be moved before
    the host has read the counts, and the assertion about them is to have the last word.

Worked example: counts [2, 1, 1, 2] of experts 0..3, two ranks of two, chunks [0, 1, 0, 1].
Runs start at [0, 2, 3, 4]; by chunk the experts stand as [0, 2, 1, 3], their runs start at
[0, 2, 3, 4] with lengths [2, 1, 1, 2]; order = [0, 1, 3, 2, 4, 5].
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import tensor_of
from moe_compile.regions.regions import MoERegion
from passes.replay.chunk_axis import ChunkAxis
from passes.replay.host_reads import ASSERT, SPLITS_DO_NOT_FIT


def emit_row_order(
    emit: Emitter, region: MoERegion, axis: ChunkAxis, rows_per_chunk: list[fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """Emit the stable order of the rows by chunk, and its inverse, each `[R]`."""
    counts = tensor_of(region.counts)
    assert counts is not None
    num_rows = assert_all_are_sent(emit, region, rows_per_chunk)
    for other in dict.fromkeys(one.sent for one in region.beside):
        is_alike = emit.call(operator.eq, emit.method("size", other, 0), num_rows)
        emit.call(ASSERT, is_alike, "what is sent beside the rows has not one entry per row")
    rows = emit.call(torch.arange, num_rows, device=counts.device)
    by_chunk = emit.call(torch.argsort, axis.chunk_of_run, stable=True)
    ends = _runs(emit, axis.run_counts)
    moved = _runs(emit, emit.call(operator.getitem, ends.counts, by_chunk))
    back = emit.call(operator.getitem, moved.starts, emit.call(torch.argsort, by_chunk))
    there = emit.call(operator.getitem, ends.starts, by_chunk)
    order = _shifted(emit, rows, moved, emit.call(operator.sub, there, moved.starts))
    return order, _shifted(emit, rows, ends, emit.call(operator.sub, back, ends.starts))


def assert_all_are_sent(emit: Emitter, region: MoERegion, sent: list[fx.Node]) -> fx.Node:
    """Emit the check that as many rows are sent as there are; return how many that is."""
    num_rows = emit.method("size", region.rows, 0)
    total = emit.call(torch.sym_sum, sent)
    emit.call(ASSERT, emit.call(operator.eq, total, num_rows), SPLITS_DO_NOT_FIT)
    return num_rows


@dataclass(frozen=True, slots=True)
class _Runs:
    """Rows that lie in runs: how many, where each run starts and ends."""

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
