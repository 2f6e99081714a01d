"""Which local experts each chunk has, where edges follow from the rows that experts have.

Contract
    Every rank finds the chunks of every rank's experts from the same sums of the same counts, so
    that a sender and a receiver agree by construction.
    A chunk is a range of a rank's experts in their order, and has one at least.

Pseudo-code
    rows[r, e] = sum over senders of what they send to expert e of rank r
    middle[r, e] = rows before e on r, and half its own
    edge[r, c] = experts whose middle lies before c / N of all rows of r
    edges leave each chunk before and behind an expert

Worked example, N = 2: rows [4, 1, 1, 1] have middles [2, 4.5, 5.5, 6.5], one of them before 3.5:
chunks of 1 and 3 experts, of 4 and 3 rows.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D, tensor_of
from moe_compile.regions.regions import MoERegion
from passes.replay.gathered_routing import ON_THE_WIRE, emit_gather


@dataclass(frozen=True, slots=True)
class LoadEdges:
    """Chunks of all ranks' experts."""

    chunk_of: fx.Node
    """`[ranks * local experts]`, rank-major."""
    own: fx.Node
    """The same of this rank's experts, `[local experts]`."""
    num_experts: fx.Node
    """Of this rank in each chunk, `[N]`."""


def emit_load_edges(emit: Emitter, region: MoERegion, num_chunks: int, rank: int) -> LoadEdges:
    """Emit the chunks of every rank's experts; this is `rank` of the group."""
    local, device = region.num_local_experts, _device(region)
    rows = emit.method("view", _emit_rows(emit, region), region.num_ranks, local)
    ends = emit.call(torch.cumsum, rows, 1)
    twice = emit.call(operator.sub, emit.call(operator.mul, ends, 2), rows)  # the middle, times 2
    total = emit.call(operator.getitem, ends, (slice(None), slice(-1, None)))
    inner = emit.call(torch.arange, 1, num_chunks, device=device)
    limits = emit.method("unsqueeze", emit.call(operator.mul, total, _twice(emit, inner)), 2)
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
    if received.numel() == size:  # of what this rank receives; else every rank's are there
        counts = emit.method("to", emit.method("reshape", region.counts, -1), ON_THE_WIRE)
        everyone = emit.call(C10D.wait_tensor, emit_gather(emit, region, counts))
    table = emit.method("reshape", everyone, region.num_ranks, size)
    return emit.method("sum", emit.method("to", table, torch.int64), 0)


def _twice(emit: Emitter, node: fx.Node) -> fx.Node:
    return emit.call(operator.mul, node, 2)


def _device(region: MoERegion) -> torch.device:
    counts = tensor_of(region.counts)
    assert counts is not None
    return counts.device
