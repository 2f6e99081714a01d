"""Which rows a chunk takes: whole experts, or a share of every expert's rows.

Contract
    What is emitted acts on each count by itself, so it commutes with exchanging counts and with
    summing them: every rank splits what it sends as its peers split what they receive.

By experts, expert e goes to chunk `e * N // local experts`, or by load to the one that the rows of
its rank's experts say (`load_edges.py`). By tokens, of the n rows of an expert
that one rank sends, chunk c takes rows `[n c // N, n (c + 1) // N)`.

Worked example by tokens, N = 2, counts [3, 1]: chunk 0 takes [1, 0] rows, chunk 1 [2, 1].
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import tensor_of
from moe_compile.regions.regions import MoERegion
from passes.replay.load_edges import emit_load_edges


@dataclass(frozen=True, slots=True)
class ChunkAxis:
    """How the rows sent fall apart in runs, and which chunk takes each run."""

    inputs: tuple[dict[fx.Node, fx.Node], ...]
    """Per chunk: counts as sent and as received -> the same for the chunk's rows alone."""
    run_counts: fx.Node
    """Rows of each run, in the order in which the runs lie."""
    chunk_of_run: fx.Node
    num_experts: fx.Node | None = None
    """How many of this rank's experts each chunk has, `[N]`; None where that is settled."""


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
        ends = [_up_to(emit, node, chunk, num_chunks) for chunk in range(num_chunks + 1)]
        for chunk, shares in enumerate(inputs):
            shares[node] = emit.call(operator.sub, ends[chunk + 1], ends[chunk])
    flat = [emit.method("reshape", shares[region.counts], -1) for shares in inputs]
    runs = emit.method("reshape", emit.call(torch.stack, flat, 1), -1)
    num_runs = num_chunks * region.num_ranks * region.num_local_experts
    ordinals = emit.call(torch.arange, num_runs, device=_device(region))
    return ChunkAxis(tuple(inputs), runs, emit.call(operator.mod, ordinals, num_chunks))


def _up_to(emit: Emitter, counts: fx.Node, chunk: int, num_chunks: int) -> fx.Node:
    """Emit how many rows of each count the chunks before `chunk` take."""
    return emit.call(operator.floordiv, emit.call(operator.mul, counts, chunk), num_chunks)


def _masked(
    emit: Emitter,
    region: MoERegion,
    instead: Mapping[fx.Node, fx.Node],
    mask: fx.Node,
    own: fx.Node | None = None,
) -> dict[fx.Node, fx.Node]:
    """Emit counts where `mask` is set for the expert of a rank, and of this rank's, `own`."""
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
