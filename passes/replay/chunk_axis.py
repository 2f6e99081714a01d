"""The rows of a chunk: of whole experts, or a share of every expert's rows; and its weights.

Contract
    The emitted code acts on each count by itself, so it commutes with exchanging counts and with
    summing them: every rank splits its sends as its peers split their receives.

By experts, expert e goes to chunk `e * N // local experts`, or by load to the chunk that follows
from the rows of its rank's experts (`split_by_load`). By tokens, of the n rows of an expert
that one rank sends, chunk c takes rows `[n c // N, n (c + 1) // N)`.

Worked example by tokens, N = 2, counts [3, 1]: chunk 0 takes [1, 0] rows, chunk 1 [2, 1].

With edges by load the local experts of each chunk follow from the experts' rows.
Every rank finds the chunks of every rank's experts from the same sums of the same counts, so
that a sender and a receiver agree by construction.
A chunk is a range of a rank's experts in their order, and has one at least.

Pseudo-code
    rows[r, e] = sum over senders of the rows they send to expert e of rank r
    middle[r, e] = rows before e on r, and half its own
    edge[r, c] = experts whose middle lies before c / N of all rows of r
    edges leave each chunk before and behind an expert

Worked example, N = 2: rows [4, 1, 1, 1] have middles [2, 4.5, 5.5, 6.5], one of them before 3.5:
chunks of 1 and 3 experts, of 4 and 3 rows.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D, tensor_of
from moe_compile.regions.regions import MoERegion, RowProof
from passes.replay.gathered import ON_THE_WIRE, emit_gather
from passes.replay.host_reads import Size, times
from passes.replay.replayed import Replay


@dataclass(frozen=True, slots=True)
class ChunkAxis:
    """The division of the rows sent into runs, and the chunk that takes each run."""

    inputs: tuple[dict[fx.Node, fx.Node], ...]
    """For each chunk: counts as sent and as received -> counts of the chunk's rows alone."""
    run_counts: fx.Node
    """Rows of each run, in the order in which the runs lie."""
    chunk_of_run: fx.Node
    num_experts: fx.Node | None = None
    """Number of this rank's experts in each chunk, `[N]`; None where known when compiling."""


def split_by_experts(
    emit: Emitter,
    region: MoERegion,
    num_chunks: int,
    instead: Mapping[fx.Node, fx.Node] | None = None,
) -> ChunkAxis:
    """Emit counts zeroed for the experts of other chunks; a run is one expert of one rank.

    Counts are read where `instead` has them.
    """
    local = region.num_local_experts
    experts = emit.call(torch.arange, local * region.num_ranks, device=_device(region))
    scaled = emit.call(operator.mul, emit.call(operator.mod, experts, local), num_chunks)
    chunk_of = emit.call(operator.floordiv, scaled, local)
    inputs = tuple(
        _masked(emit, region, instead or {}, emit.call(operator.eq, chunk_of, chunk))
        for chunk in range(num_chunks)
    )
    return ChunkAxis(inputs, emit.method("reshape", region.counts, -1), chunk_of)


def split_by_load(emit: Emitter, region: MoERegion, num_chunks: int, rank: int) -> ChunkAxis:
    """Emit counts zeroed for the experts of other chunks, whose edges follow from all counts."""
    edges = emit_load_edges(emit, region, num_chunks, rank)
    own = emit.method("repeat", edges.own, region.num_ranks)
    inputs = tuple(
        _masked(emit, region, {}, *(emit.call(operator.eq, of, c) for of in (edges.chunk_of, own)))
        for c in range(num_chunks)
    )
    runs = emit.method("reshape", region.counts, -1)
    return ChunkAxis(inputs, runs, edges.chunk_of, edges.num_experts)


def split_by_tokens(emit: Emitter, region: MoERegion, num_chunks: int) -> ChunkAxis:
    """Emit each chunk's share of every count; a run is one expert's rows of one chunk."""
    inputs: list[dict[fx.Node, fx.Node]] = [{} for _ in range(num_chunks)]
    for node in (region.counts, region.received_counts):
        for shares, share in zip(inputs, shares_of(emit, node, num_chunks), strict=True):
            shares[node] = share
    flat = [emit.method("reshape", shares[region.counts], -1) for shares in inputs]
    runs = emit.method("reshape", emit.call(torch.stack, flat, 1), -1)
    num_runs = num_chunks * region.num_ranks * region.num_local_experts
    ordinals = emit.call(torch.arange, num_runs, device=_device(region))
    return ChunkAxis(tuple(inputs), runs, emit.call(operator.mod, ordinals, num_chunks))


def shares_of(emit: Emitter, counts: fx.Node, num_chunks: int) -> list[fx.Node]:
    """Emit each chunk's share of every count."""
    ends = [_up_to(emit, counts, chunk, num_chunks) for chunk in range(num_chunks + 1)]
    return [emit.call(operator.sub, end, start) for start, end in itertools.pairwise(ends)]


def _up_to(emit: Emitter, counts: fx.Node, chunk: int, num_chunks: int) -> fx.Node:
    """Emit how many rows of each count go to chunks before `chunk`."""
    return emit.call(operator.floordiv, emit.call(operator.mul, counts, chunk), num_chunks)


def _masked(
    emit: Emitter,
    region: MoERegion,
    instead: Mapping[fx.Node, fx.Node],
    mask: fx.Node,
    own: fx.Node | None = None,
) -> dict[fx.Node, fx.Node]:
    """Emit counts where `mask` is set for the expert of a rank; for this rank's experts, `own`."""
    env = {}
    for node in (region.counts, region.received_counts):
        tensor = tensor_of(node)
        assert tensor is not None
        size = region.num_ranks * region.num_local_experts
        repeats = tensor.numel() // size  # all-gathered counts hold every rank's vector
        one = own if own is not None and node is region.received_counts else mask
        flat = one if repeats == 1 else emit.method("repeat", mask, repeats)
        shaped = emit.method("to", emit.method("view", flat, *tensor.shape), tensor.dtype)
        env[node] = emit.call(operator.mul, instead.get(node, node), shaped)
    return env


def _device(region: MoERegion) -> torch.device:
    counts = tensor_of(region.counts)
    assert counts is not None
    return counts.device


@dataclass(frozen=True, slots=True)
class LoadEdges:
    """Chunks of all ranks' experts."""

    chunk_of: fx.Node
    """Chunk of each rank's experts, `[ranks * local experts]`, rank-major."""
    own: fx.Node
    """Chunk of this rank's experts, `[local experts]`."""
    num_experts: fx.Node
    """Number of this rank's experts in each chunk, `[N]`."""


def emit_load_edges(emit: Emitter, region: MoERegion, num_chunks: int, rank: int) -> LoadEdges:
    """Emit the chunks of every rank's experts; this is `rank` of the group."""
    local, device = region.num_local_experts, _device(region)
    rows = emit.method("view", _emit_rows(emit, region), region.num_ranks, local)
    ends = emit.call(torch.cumsum, rows, 1)
    twice = emit.call(operator.sub, emit.call(operator.mul, ends, 2), rows)  # the middle, times 2
    total = emit.call(operator.getitem, ends, (slice(None), slice(-1, None)))
    inner = emit.call(torch.arange, 1, num_chunks, device=device)
    limits = emit.method(
        "unsqueeze", emit.call(operator.mul, total, emit.call(operator.mul, inner, 2)), 2
    )
    scaled = emit.method("unsqueeze", emit.call(operator.mul, twice, num_chunks), 1)
    before = emit.method("sum", emit.call(operator.lt, scaled, limits), 2)
    spare = emit.call(torch.cummax, emit.call(operator.sub, before, inner), 1)
    spare = emit.call(operator.getitem, spare, 0)
    spare = emit.method("clamp", spare, min=0, max=local - num_chunks)
    edges = emit.method("unsqueeze", emit.call(operator.add, spare, inner), 2)
    experts = emit.call(torch.arange, local, device=device)
    chunk_of = emit.method("sum", emit.call(operator.ge, experts, edges), 1)
    own = emit.call(operator.getitem, chunk_of, rank)
    chunks = emit.call(torch.arange, num_chunks, device=device)
    is_in = emit.call(operator.eq, own, emit.method("unsqueeze", chunks, 1))
    return LoadEdges(emit.method("reshape", chunk_of, -1), own, emit.method("sum", is_in, 1))


def _emit_rows(emit: Emitter, region: MoERegion) -> fx.Node:
    """Emit the rows of all ranks' experts, summed over senders, `[ranks * local experts]`."""
    received, size = tensor_of(region.received_counts), region.num_ranks * region.num_local_experts
    assert received is not None
    everyone = region.received_counts
    if received.numel() == size:  # counts of this rank's rows, not of every rank's
        counts = emit.method("to", emit.method("reshape", region.counts, -1), ON_THE_WIRE)
        everyone = emit.call(C10D.wait_tensor, emit_gather(emit, region, counts))
    table = emit.method("reshape", everyone, region.num_ranks, size)
    return emit.method("sum", emit.method("to", table, torch.int64), 0)


OFFSET_BYTES: Final = 4
"""Bytes of one offset of a grouped product, an int32."""
ALIGNED_BYTES: Final = 16
"""Alignment of memory that Inductor passes to a product uncopied; other memory is copied first."""


def split_weights(
    emit: Emitter, sliceable: Iterable[fx.Node], sizes: Sequence[Size]
) -> dict[fx.Node, list[fx.Node]]:
    """Emit the weight of each sliceable grouped GEMM in one piece per chunk, of so many experts.

    There is one split per GEMM. The weight's gradient from there is one concatenation, not a sum
    of padded pieces, and still a term of its own, added where the GEMM's was. It has the weight's
    memory order, as the GEMM's would: a transposed weight is split in its own order.
    """
    pieces: dict[fx.Node, list[fx.Node]] = {}
    for gemm in sliceable:
        weight, tensor = gemm.args[1], tensor_of(gemm.args[1])
        assert tensor is not None
        crossed = not tensor.is_contiguous()
        along = emit.method("transpose", weight, -2, -1) if crossed else weight
        parts = emit.call(torch.split, along, [*sizes])
        each = [emit.call(operator.getitem, parts, c) for c in range(len(sizes))]
        pieces[gemm] = [emit.method("transpose", p, -2, -1) for p in each] if crossed else each
    return pieces


def slice_to_chunk(
    emit: Emitter,
    region: MoERegion,
    proof: RowProof,
    weights: Mapping[fx.Node, fx.Node],
    replay: Replay,
) -> None:
    """Give each grouped GEMM of one chunk the weights and offsets of the chunk's experts only."""
    for gemm, weight in weights.items():
        padding = proof.padding.get(gemm, (0,) * region.num_local_experts)
        _slice(emit, gemm, weight, padding, replay)


def slice_by_load(
    emit: Emitter,
    proof: RowProof,
    weights: Mapping[fx.Node, fx.Node],
    sizes: Sequence[Size],
    chunk: int,
    replay: Replay,
) -> None:
    """Give each grouped GEMM of `chunk` the weights and offsets of its experts, as many as read.

    Groups of other experts have as many rows each, of `proof.padding`, and are left out as below.
    """
    for gemm, weight in weights.items():
        whole, offsets = gemm.args[1], gemm.kwargs["offs"]
        assert isinstance(whole, fx.Node) and isinstance(offsets, fx.Node)
        ends, unit = replay.env[offsets], max(proof.padding.get(gemm, ()), default=0)
        before = _padded(emit, sizes[:chunk], unit)
        behind = _padded(emit, sizes[chunk + 1 :], unit)
        if before:
            ends = emit.call(operator.sub, ends, before)
        sliced = emit.call(operator.getitem, emit.call(torch.split, ends, [*sizes]), chunk)
        replay.pruned.inputs[gemm] = {offsets: sliced, whole: weight}
        if before or behind:
            replay.pruned.without_rows[gemm] = (before, behind)


def _padded(emit: Emitter, sizes: Sequence[Size], unit: int) -> Size:
    """Return the number of padding rows in so many groups, which belong to no expert."""
    return times(emit, emit.call(torch.sym_sum, [*sizes]), unit) if unit and sizes else 0


def _slice(
    emit: Emitter, gemm: fx.Node, weight: fx.Node, padding: Sequence[int], replay: Replay
) -> None:
    """Give a grouped GEMM of one chunk the weights and offsets of the chunk's experts only.

    Groups of other experts may have some rows each, of `padding`; the GEMM is given none of these.
    Were they added to groups of the chunk, the gradient of a weight would be a product over more
    rows, which a CPU rounds differently where they come first.
    """
    whole, offsets = gemm.args[1], gemm.kwargs["offs"]
    assert isinstance(whole, fx.Node) and isinstance(offsets, fx.Node)
    start, stop = replay.experts.start, replay.experts.stop
    before, behind = sum(padding[:start]), sum(padding[stop:])
    ends = replay.env[offsets]
    if before:  # subtracted in the kernel that computes them; slicing is no kernel
        ends = emit.call(operator.sub, ends, before)
    if start * OFFSET_BYTES % ALIGNED_BYTES:  # Inductor writes a strided value once
        rolled = emit.call(torch.roll, ends, -start)
        sliced = emit.call(torch.as_strided, rolled, (stop - start,), (1,))
    else:
        sliced = emit.call(operator.getitem, ends, slice(start, stop))
    replay.pruned.inputs[gemm] = {offsets: sliced, whole: weight}
    if before or behind:
        replay.pruned.without_rows[gemm] = (before, behind)
