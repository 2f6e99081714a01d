"""All integers that the host needs of the chunks of a region, in one read.

Contract
    Splits of the whole dispatch that others need are the sums of those of its chunks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import input_splits, output_splits, tensor_of
from moe_compile.regions.new_order import parts
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.rewrites import Effects
from passes.replay.host_reads import ASSERT, SPLITS_DO_NOT_FIT, BulkRead, most_of
from passes.replay.replayed import Replay, emit_until_reads, needed_for


@dataclass(frozen=True, slots=True)
class ChunkReads:
    """The integers that the host read."""

    sent: list[fx.Node]
    """Rows sent of each chunk."""
    received: list[fx.Node]
    """Rows received of each chunk; [] where the region's counts do not tell."""
    others: list[fx.Node]
    """The elements of another vector."""


def read_chunks(
    emit: Emitter,
    region: MoERegion,
    whole: Replay,
    replays: Sequence[Replay],
    effects: Effects,
    *,
    received: Sequence[fx.Node] = (),
    others: tuple[fx.Node, int] | None = None,
) -> ChunkReads:
    """Emit the read; set the integers that `whole` and the replays read.

    `whole` is the one replay where there is one. `received` are counts of each chunk, in place of
    the region's; `others` is a vector of so many elements, to be read as well.
    """
    is_alone = whole is replays[0]
    reads = BulkRead(emit)
    sent, got = input_splits(region.dispatch), output_splits(region.dispatch)
    asked = (*effects.bulk, *effects.served) if is_alone else effects.bulk
    wanted, part = needed_for(asked, region), parts(region, effects.bulk)
    for replay in replays:
        emit_until_reads(emit, region, replay, reads, part, wanted)
    of_chunks = {n for n in (*sent, *got) if all(n in reads.asked_by(r) for r in replays)}
    if not is_alone:
        read_whole = [node for node in effects.served if node not in of_chunks]
        served = needed_for(read_whole, region)
        emit_until_reads(emit, region, whole, reads, part, served)
    rows_sent, rows_received = [], []
    told = received or (region.received_counts,) * len(replays)
    for replay, counts in zip(replays, told, strict=True):
        total = emit.method("sum", replay.env.get(region.counts, region.counts))
        rows_sent.append(reads.add_sum(total, replay, sent))
        if received or _counts_one_rank(region):
            total = emit.method("sum", replay.env.get(counts, counts))
            rows_received.append(reads.add_sum(total, replay, got))
    numbers = [] if others is None else reads.add_vector(*others)
    values = reads.finish()
    _assert_that_they_fit(emit, region, [values[i] for i in rows_sent])
    for replay in (whole, *replays):
        replay.env.update({n: values[i] for n, i in reads.asked_by(replay).items()})
    for node in effects.served:
        if node in of_chunks and not is_alone:
            whole.env[node] = emit.call(torch.sym_sum, [replay.env[node] for replay in replays])
    return ChunkReads(*([values[i] for i in of] for of in (rows_sent, rows_received, numbers)))


def _assert_that_they_fit(emit: Emitter, region: MoERegion, sent: Sequence[fx.Node]) -> None:
    """Emit the check that no more rows are sent than there are, before rows are cut to size.

    Rows are often cut off at the sum of the splits sent, which then says nothing of the counts.
    """
    rows = tensor_of(region.rows)
    most = None if rows is None else most_of(rows.shape[0])
    if most is not None:
        fits = emit.call(operator.le, emit.call(torch.sym_sum, [*sent]), most)
        emit.call(ASSERT, fits, SPLITS_DO_NOT_FIT)


def _counts_one_rank(region: MoERegion) -> bool:
    """Whether the counts are of the rows that one rank receives, not of all ranks' rows."""
    tensor = tensor_of(region.received_counts)
    return tensor is not None and tensor.numel() == region.num_ranks * region.num_local_experts
