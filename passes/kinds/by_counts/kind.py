"""MoE regions whose rows are split by counts: in chunks, on gathered tokens, in two hops, in equal
parts.

Contract
    A region that a proof refuses is found all the same: its rows may travel in another format.
    Rewritten, a region has one exchange of counts and one bulk host read whatever the number of
    chunks, beside reads whose integers others need before it; where edges follow from counts, one
    gather of counts. In equal parts it has no host read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.traced_nodes import Layers
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.open_sorts import make_stable
from moe_compile.graph.query import bytes_of_row, source_place, tensor_of
from moe_compile.plan.planned import Findings, FoundExperts, PlannedExperts
from moe_compile.plan.state import CompileState
from moe_compile.proof.row_proof import prove_rows_independent
from moe_compile.regions.detect_moe import find_moe_regions
from moe_compile.regions.host_reads import count_host_reads
from moe_compile.regions.regions import MoERegion, RowProof
from moe_compile.report.region_reports import RegionReport
from passes.kinds.by_counts.experts import plan_experts
from passes.kinds.by_counts.products import find_products
from passes.kinds.by_counts.words import region_report
from passes.kinds.contract import Emitted, Finds, RegionKind
from passes.replay.even_rows import emit_even
from passes.replay.gathered import emit_gathered
from passes.replay.hops import HopSplit
from passes.replay.masked_replay import chunk_bounds, emit_chunks
from passes.replay.two_hops import emit_two_hops


class ByCounts(RegionKind[PlannedExperts]):
    """Regions of experts by counts; see the module docstring."""

    name: ClassVar[str] = "experts"

    def find(self, facts: GraphFacts, config: MegaMoEConfig, before: Findings) -> Finds:
        """Return the regions, each with its proof."""
        del before
        regions, others = find_moe_regions(facts)
        found = tuple(_found(region, config) for region in regions)
        return Finds(found=found, others=tuple(others))

    def plan(self, state: CompileState, layers: Layers) -> tuple[PlannedExperts, ...]:
        """Return the plan of every region; note launches, results and nodes that will be dead."""
        planned, state.dead = plan_experts(state, layers)
        regions = [one.found.region for one in planned]
        state.launches = {
            region.name: {"dispatch": (region.dispatch,), "combine": (region.combine,)}
            for region in regions
        }
        state.results = {region.name: region.result for region in regions}
        return planned

    def emit(self, one: PlannedExperts, state: CompileState) -> Emitted:
        """Emit a region in its form; note its launches and its result."""
        region, effects, form = one.found.region, one.effects, _form(one)
        assert effects is not None
        state.launches[region.name] = {
            "dispatch": tuple(form.dispatches),
            "combine": tuple(form.combines),
        }
        if form.overflow is not None:
            state.overflows.append(form.overflow)
        if region.result in form.instead:
            state.results[region.name] = form.instead[region.result]
        else:
            state.results.pop(region.name, None)
        return Emitted(
            instead={**effects.sizes, **form.instead},
            moved=((effects.moved, effects.read_at), (region.between, region.result)),
            num_host_reads=0 if one.plan.room else 1,
        )

    def say(self, one: PlannedExperts, config: MegaMoEConfig) -> RegionReport:
        """Return the report on a region."""
        return region_report(one, config.dispatch)


def _found(region: MoERegion, config: MegaMoEConfig) -> FoundExperts:
    rows = {"dispatch": _payload(region.dispatch), "combine": _payload(region.combine)}
    return FoundExperts(
        region=region,
        proof=prove_rows_independent(region, may_round=config.allows("bounded")),
        where=source_place(region.dispatch),
        num_host_reads=count_host_reads(region),
        rows=rows,
        row_bytes={name: bytes_of_row(tensor) for name, tensor in rows.items()},
        products=find_products(region, config),
    )


def _payload(launch: fx.Node) -> torch.Tensor | None:
    (payload, *_) = launch.all_input_nodes
    return tensor_of(payload)


class _Form(NamedTuple):
    """The nodes emitted for a region."""

    dispatches: Sequence[fx.Node]
    combines: Sequence[fx.Node]
    instead: Mapping[fx.Node, fx.Node]
    overflow: fx.Node | None = None


def _form(one: PlannedExperts) -> _Form:
    """Emit a region in equal parts, on gathered tokens, in two hops, or in chunks."""
    region, proof, effects = one.found.region, one.proof, one.effects
    assert effects is not None and isinstance(proof, RowProof)
    if one.even is not None:
        even = emit_even(one.even)
        instead = {region.result: even.result}
        return _Form(even.dispatches, even.combines, instead, even.overflow)
    if one.gathered is not None:
        gathered = emit_gathered(one.gathered, effects, _rank_in(region.group))
        instead = {**gathered.instead, one.gathered.found.sums.total: gathered.result}
        return _Form(gathered.gathers, gathered.reduces, instead)
    if one.two_hops is not None:
        two_hops = emit_two_hops(one.two_hops, proof, _cut(one), effects)
        return _Form(two_hops.hops, two_hops.combines, two_hops.instead)
    num, by_tokens = one.plan.num_chunks, one.plan.by_tokens
    rank = _rank_in(region.group) if one.plan.by_load else None
    for sort in proof.reordered:
        make_stable(sort)
    chunks = emit_chunks(region, proof, num, effects, by_tokens=by_tokens, rank_by_load=rank)
    return _Form(chunks.dispatches, chunks.combines, chunks.instead)


def _cut(one: PlannedExperts) -> HopSplit:
    """Return the parts in which rows travel in two hops: chunks of experts, slices of tokens."""
    local, num = one.found.region.num_local_experts, one.plan.num_chunks
    if one.plan.by_tokens:
        return HopSplit((0, local), slices=num)
    edges = (0, *(chunk.stop for chunk in chunk_bounds(local, num)))
    return HopSplit(edges, slices=one.plan.hop_slices)


def _rank_in(group: str) -> int:
    return dist.get_rank(dist.distributed_c10d._resolve_process_group(group))
