"""Run a MoE region on tokens that all ranks gather, and add the results up by a reduce-scatter.

Contract
    Requires  a proof that the experts treat rows independently given the counts, the gather that
              made the rows, the sum that follows, and equally many tokens, and rows, on all ranks.
    Keeps     what the experts are given: the rows, their order and the counts are those that the
              all-to-all would bring.

Pseudo-code
    all-gather the tokens of each slice, the counts and tokens of rows, the factors of rows
    per slice: this rank's rows = the tokens they name, by sender, then expert
               the region's body on those rows and counts
               their sums per token of every rank -> reduce-scatter: this rank's tokens
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D
from moe_compile.regions.new_order import parts
from moe_compile.regions.rewrites import Surroundings
from moe_compile.regions.token_regions import GatheredForm
from passes.replay.gathered_routing import Routing, emit_gather, emit_routing
from passes.replay.gathered_slice import Slice, SliceWriter
from passes.replay.host_reads import BulkRead
from passes.replay.replayed import Replay, emit_until_reads, needed_for
from passes.replay.sizes import extent


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a region became."""

    result: fx.Node
    """The sums of this rank's tokens, instead of the sum per token."""
    instead: dict[fx.Node, fx.Node]
    """Host read whose value the graph needs outside the region -> what to read instead."""
    gathers: tuple[fx.Node, ...]
    reduces: tuple[fx.Node, ...]
    """Launches that move the tokens, and the sums, of each slice."""
    routing: frozenset[fx.Node]
    """What tells every rank what all ranks route where: once for all slices."""


def emit_gathered(form: GatheredForm, around: Surroundings, rank: int) -> Gathered:
    """Emit the region in its new form for a rank; the old one is for the caller to take out.

    `around` names the host reads of the region that others need and that the one read serves.
    """
    region, found = form.region, form.found
    gathers = _launch_tokens(form)
    emit = Emitter(region.result)
    before = set(emit.graph.nodes)
    routing = emit_routing(emit, region, found, form.num_slices)
    told = frozenset(node for node in emit.graph.nodes if node not in before)
    writer = SliceWriter(emit, form, routing, rank)
    slices = [writer.begin(c, launch) for c, launch in enumerate(gathers)]
    instead = _read_host(writer, form, routing, slices, around)
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
    routing: Routing,
    slices: list[Slice],
    around: Surroundings,
) -> dict[fx.Node, fx.Node]:
    """Emit the one read of all that the host must know; return what the served reads became."""
    emit, region = writer.emit, form.region
    reads = BulkRead(emit)
    for counts in routing.counts:
        reads.add(emit.method("sum", writer.mine(counts)))
    whole = Replay(range(region.num_local_experts), {})
    dependence = Dependence(region.result.graph)
    part_of = parts(region, around.bulk, dependence)
    if around.served:
        counts = emit.method("sum", emit.call(torch.stack, list(routing.counts)), 0)
        whole.env[region.received_counts] = writer.received(counts)
        needed = needed_for(around.served, region, dependence)
        emit_until_reads(emit, region, whole, reads, part_of, needed)
    wanted = needed_for(around.bulk, region, dependence) & set(form.needs.nodes)
    for part in slices:
        emit_until_reads(emit, region, part.replay, reads, part_of, wanted)
    values = reads.finish()
    for replay in (whole, *(part.replay for part in slices)):
        replay.env.update({n: values[i] for n, i in reads.asked_by(replay).items()})
    for part, num_rows in zip(slices, values, strict=False):
        writer.set_num_rows(part, num_rows)
    return {node: whole.env[node] for node in around.served}


def _joined(emit: Emitter, form: GatheredForm, reduces: list[fx.Node]) -> fx.Node:
    """Emit the sums of all this rank's tokens, and what they are added to."""
    sums = [emit.call(C10D.wait_tensor, launch) for launch in reduces]
    result = sums[0] if len(sums) == 1 else emit.call(torch.cat, sums)
    if form.found.sums.base is not None:
        result = emit.call(operator.add, form.found.sums.base, result)
    return result
