"""Run a MoE region N times, each time on the rows and counts of one chunk.

Contract
    Requires  a proof that the region's experts treat rows independently given the counts, and
              its surroundings: that nothing tells when it runs at its result.
    Keeps     every value the graph has outside the region, bit for bit; every side effect.
    Order     all counts and one bulk host read where the region's own last read stands, so that
              who needs its integers stays where he is; at the region's result all dispatch
              launches, then per chunk: wait, experts, combine.

A region is f(rows, counts). The same nodes run once per chunk on the chunk's rows and on the
chunk's part of the counts; a correct region is right for any counts, so nothing need be known
about the experts. Exchanging counts and taking parts of them commute (chunk_axis.py), so the one
count exchange serves all chunks.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import input_splits, output_splits, tensor_of
from moe_compile.ops.permute import PERMUTE_ROWS
from moe_compile.regions.new_order import parts
from moe_compile.regions.regions import MoERegion, RowProof
from moe_compile.regions.rewrites import Surroundings
from passes.replay.autocast import AutocastEmitter
from passes.replay.chunk_axis import split_by_experts, split_by_tokens
from passes.replay.host_reads import BulkRead
from passes.replay.prune import prune_other_experts
from passes.replay.replayed import Replay, emit_rest, emit_until_reads, needed_for
from passes.replay.row_order import emit_row_order

OFFSET_BYTES: Final = 4
"""Of one offset of a grouped product, an int32."""
ALIGNED_BYTES: Final = 16
"""Where memory begins that Inductor hands to a product as it is; else it makes a copy for each."""


def chunk_bounds(num_local_experts: int, num_chunks: int) -> list[range]:
    """Return the local experts of each chunk; sizes differ by at most one.

    Expert e belongs to chunk `e * num_chunks // num_local_experts`.
    """
    edges = [-(-c * num_local_experts // num_chunks) for c in range(num_chunks + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


@dataclass(frozen=True, slots=True)
class Chunked:
    """What a region became."""

    instead: dict[fx.Node, fx.Node]
    """Result of the region, or host read whose value the graph needs outside it -> what to read
    instead."""
    dispatches: tuple[fx.Node, ...]
    combines: tuple[fx.Node, ...]
    """Launches of each chunk's dispatch and combine, in order of chunks."""


def emit_chunks(
    region: MoERegion,
    proof: RowProof,
    num_chunks: int,
    around: Surroundings,
    dependence: Dependence,
    *,
    by_tokens: bool = False,
) -> Chunked:
    """Emit the region in `num_chunks` chunks before its result.

    `dependence` is of the graph as it was before any region was emitted. `around` says where the
    host reads, and which host reads of the region others need: they join the bulk read. A chunk
    holds whole experts or, `by_tokens`, a share of each's rows.
    What was the region before stays, for the caller to replace and to erase.
    """
    early, emit = AutocastEmitter(around.read_at), AutocastEmitter(region.result)
    split = split_by_tokens if by_tokens else split_by_experts
    axis = split(early, region, num_chunks)
    bounds = experts_of_chunks(region, num_chunks, by_tokens=by_tokens)
    replays = [
        Replay(experts, env, prune_other_experts(region, proof, experts))
        for env, experts in zip(axis.inputs, bounds, strict=True)
    ]
    whole = Replay(range(region.num_local_experts), {})
    rows_per_chunk = _emit_reads(early, region, whole, replays, around, dependence)

    order, inverse = emit_row_order(emit, region, axis, rows_per_chunk)
    parts = {
        sent: emit.call(torch.split, emit.call(PERMUTE_ROWS, sent, order, inverse), rows_per_chunk)
        for sent in dict.fromkeys(one.sent for one in region.dispatched)
    }
    sliceable = () if by_tokens else proof.sliceable
    weights = _split_weights(emit, sliceable, bounds)
    for c, replay in enumerate(replays):
        for sent, pieces in parts.items():
            replay.env[sent] = emit.call(operator.getitem, pieces, c)
        emit_rest(emit, region.count_side, replay)
    for replay in replays:
        for one in region.dispatched:
            replay.env[one.launch] = emit.copy(one.launch, replay.env)
    for c, replay in enumerate(replays):
        for gemm in sliceable:
            padding = proof.padding.get(gemm, (0,) * region.num_local_experts)
            _slice_to_chunk(emit, gemm, weights[gemm][c], padding, replay)
        emit_rest(emit, region.row_side, replay)

    instead = {node: whole.env[node] for node in around.served}
    for node in region.results:
        instead[node] = emit.call(PERMUTE_ROWS, _joined(emit, node, replays), inverse, order)
        instead[node].meta.update(node.meta)  # later passes read its sizes
    return Chunked(
        instead=instead,
        dispatches=tuple(replay.env[region.dispatch] for replay in replays),
        combines=tuple(replay.env[region.combine] for replay in replays),
    )


def _joined(emit: Emitter, result: fx.Node, replays: list[Replay]) -> fx.Node:
    """Return what came back to all chunks, one chunk after another.

    Rows of one number get a column for it: autograd gives an empty vector in a concatenation a
    gradient of zeros that depends on nothing, and what exchanges it back would leave the backward
    pass, on a rank without tokens alone.
    """
    parts, rows = [replay.env[result] for replay in replays], tensor_of(result)
    if rows is None or rows.dim() > 1:
        return emit.call(torch.cat, parts)
    columns = [emit.method("unsqueeze", part, 1) for part in parts]
    return emit.method("squeeze", emit.call(torch.cat, columns), 1)


def experts_of_chunks(region: MoERegion, num_chunks: int, *, by_tokens: bool) -> list[range]:
    """Return the local experts of each chunk: by tokens, every chunk has rows of all."""
    if by_tokens:
        return [range(region.num_local_experts)] * num_chunks
    return chunk_bounds(region.num_local_experts, num_chunks)


def _emit_reads(
    emit: Emitter,
    region: MoERegion,
    whole: Replay,
    replays: list[Replay],
    around: Surroundings,
    dependence: Dependence,
) -> list[fx.Node]:
    """Emit all that the host must know, in one read; return the rows of each chunk.

    Splits of the whole dispatch that others need are the sums of those of its chunks.
    """
    reads = BulkRead(emit)
    sent, received = input_splits(region.dispatch), output_splits(region.dispatch)
    wanted = needed_for(around.bulk, region, dependence)
    part = parts(region, around.bulk, dependence)
    for replay in replays:
        emit_until_reads(emit, region, replay, reads, part, wanted)
    of_chunks = {n for n in (*sent, *received) if all(n in reads.asked_by(r) for r in replays)}
    read_whole = [node for node in around.served if node not in of_chunks]
    served = needed_for(read_whole, region, dependence)
    emit_until_reads(emit, region, whole, reads, part, served)
    rows = []
    for replay in replays:
        total = emit.method("sum", replay.env[region.counts])
        rows.append(reads.add_sum(total, replay, sent))
        if _counts_one_rank(region.received_counts, region):
            total = emit.method("sum", replay.env[region.received_counts])
            reads.add_sum(total, replay, received)
    values = reads.finish()
    for replay in (whole, *replays):
        replay.env.update({n: values[i] for n, i in reads.asked_by(replay).items()})
    for node in around.served:
        if node in of_chunks:
            whole.env[node] = emit.call(torch.sym_sum, [replay.env[node] for replay in replays])
    return [values[number] for number in rows]


def _counts_one_rank(counts: fx.Node, region: MoERegion) -> bool:
    """Whether the counts are of the rows one rank sends or receives, not of all ranks' rows."""
    tensor = tensor_of(counts)
    return tensor is not None and tensor.numel() == region.num_ranks * region.num_local_experts


def _split_weights(
    emit: Emitter, sliceable: Iterable[fx.Node], bounds: list[range]
) -> dict[fx.Node, list[fx.Node]]:
    """Emit the weight of each sliceable grouped GEMM in one piece per chunk.

    One split per GEMM: what the weight receives as its gradient from there is one concatenation,
    not a sum of padded pieces, and still a term of its own, added where the GEMM's was. It lies in
    memory as the weight does, as the GEMM's would: a weight given transposed is split as it lies.
    """
    pieces: dict[fx.Node, list[fx.Node]] = {}
    for gemm in sliceable:
        weight, tensor = gemm.args[1], tensor_of(gemm.args[1])
        assert tensor is not None
        crossed = not tensor.is_contiguous()
        along = emit.method("transpose", weight, -2, -1) if crossed else weight
        parts = emit.call(torch.split, along, [len(b) for b in bounds])
        each = [emit.call(operator.getitem, parts, c) for c in range(len(bounds))]
        pieces[gemm] = [emit.method("transpose", p, -2, -1) for p in each] if crossed else each
    return pieces


def _slice_to_chunk(
    emit: Emitter, gemm: fx.Node, weight: fx.Node, padding: Sequence[int], replay: Replay
) -> None:
    """Give a grouped GEMM of one chunk the weights and offsets of the chunk's experts only.

    Groups of other experts may have some rows each, of `padding`: of these it is given none. Were
    they added to groups of the chunk, the gradient of a weight would be a product over more rows,
    which a CPU rounds otherwise where they come first.
    """
    whole, offsets = gemm.args[1], gemm.kwargs["offs"]
    assert isinstance(whole, fx.Node) and isinstance(offsets, fx.Node)
    start, stop = replay.experts.start, replay.experts.stop
    before, behind = sum(padding[:start]), sum(padding[stop:])
    ends = replay.env[offsets]
    if before:  # taken off all, in the kernel that computes them: slicing them is no kernel
        ends = emit.call(operator.sub, ends, before)
    if start * OFFSET_BYTES % ALIGNED_BYTES:  # Inductor writes out what is read by strides, once
        rolled = emit.call(torch.roll, ends, -start)
        sliced = emit.call(torch.as_strided, rolled, (stop - start,), (1,))
    else:
        sliced = emit.call(operator.getitem, ends, slice(start, stop))
    replay.pruned.inputs[gemm] = {offsets: sliced, whole: weight}
    if before or behind:
        replay.pruned.without_rows[gemm] = (before, behind)
