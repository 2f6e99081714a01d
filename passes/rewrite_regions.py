"""Carry out the plan of a graph: experts in chunks, on gathered tokens, in two hops; attention.

Contract
    Requires  REGIONS_FOUND, PLANNED.
    Provides  REWRITTEN.
    Keeps     every value outside the regions, every side effect, one count exchange and one bulk
              host read per region whatever the number of chunks, beside reads whose integers
              others need before it; where edges follow from counts, one gather of counts.
              Values change no bit but where the plan says so: see `passes/planned`.

All new forms are emitted first: until then each reads what the model's own form read, a count that
two regions share, or another region's result. Then readers are told to read the new results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
import torch.fx as fx

from moe_compile.attention.attention_regions import AttentionRegion
from moe_compile.graph.dependence import Dependence
from moe_compile.graph.edit import erase_dead, erase_unused, move_before, replace_uses
from moe_compile.graph.open_sorts import make_stable
from moe_compile.journal.entries import PassReport
from moe_compile.plan.planned import PlannedCapacity, PlannedExperts
from moe_compile.plan.state import CompileState
from moe_compile.regions.regions import RowProof
from passes.contract import Fact, GraphPass
from passes.replay.capacity_chunks import emit_capacity_chunks
from passes.replay.divided import emit_divided
from passes.replay.gathered import emit_gathered
from passes.replay.head_groups import emit_head_groups
from passes.replay.hops import Cut
from passes.replay.host_reads import forget_bindings
from passes.replay.masked_replay import chunk_bounds, emit_chunks


@dataclass(frozen=True)
class RewriteRegions(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "rewrite_regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_FOUND, Fact.PLANNED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.REWRITTEN})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Emit every region anew, have its readers read that, erase what nothing needs."""
        dependence = Dependence(graph)
        experts = [one for one in state.experts if one.is_rewritten]
        attention = [
            (one.found.region, one.plan.num_chunks)
            for one in state.attention
            if isinstance(one.found.region, AttentionRegion) and one.is_rewritten
        ]
        capacity = [one for one in state.capacity if one.is_rewritten]
        place = {node: i for i, node in enumerate(graph.nodes)}
        bodies = [sorted({*region.body}, key=place.__getitem__) for region, _ in attention]
        bodies += [list(one.found.region.body) for one in capacity]
        finish = [_emit_experts(one, dependence, state) for one in experts]
        finish += [_emit_attention(*one) for one in attention]
        finish += [_emit_capacity(one) for one in capacity]
        for replace_and_move in finish:
            replace_and_move()
        erase_dead(dependence.in_order(state.dead))
        for body in bodies:
            erase_unused(body)
        forget_bindings(graph)
        state.gathered_groups.update(one.plan.group for one in experts if one.plan.gathers)
        return PassReport(
            pass_name=self.name,
            applied=(
                *(one.found.region.name for one in experts),
                *(one.found.region.name for one in capacity),
                *(region.name for region, _ in attention),
            ),
            measures={"num_bulk_host_reads": len(experts)},
        )


def _emit_experts(
    one: PlannedExperts, dependence: Dependence, state: CompileState
) -> Callable[[], None]:
    """Emit a MoE region anew; return what puts it in the place of the old one."""
    region, around = one.found.region, one.around
    assert around is not None and isinstance(one.proof, RowProof)
    if one.gathered is not None:
        gathered = emit_gathered(one.gathered, around, _rank_in(region.group))
        dispatches, combines = gathered.gathers, gathered.reduces
        instead = {**gathered.instead, one.gathered.found.sums.total: gathered.result}
    elif one.divided is not None:
        cut = _cut(one)
        divided = emit_divided(one.divided, one.proof, cut, around, dependence)
        dispatches, combines, instead = divided.hops, divided.combines, divided.instead
    else:
        num, by_tokens = one.plan.num_chunks, one.plan.by_tokens
        rank = _rank_in(region.group) if one.plan.by_load else None
        for sort in one.proof.reordered:
            make_stable(sort)
        chunks = emit_chunks(
            region, one.proof, num, around, dependence, by_tokens=by_tokens, rank_by_load=rank
        )
        dispatches, combines = chunks.dispatches, chunks.combines
        instead = chunks.instead
    state.launches[region.name] = {"dispatch": tuple(dispatches), "combine": tuple(combines)}
    if region.result in instead:
        state.results[region.name] = instead[region.result]
    else:
        state.results.pop(region.name, None)

    def replace_and_move() -> None:
        replace_uses(around.sizes)
        replace_uses(instead)
        move_before(around.moved, around.read_at)
        move_before(region.between, region.result)

    return replace_and_move


def _cut(one: PlannedExperts) -> Cut:
    """Return the parts in which rows go in two hops: chunks of experts, slices of tokens."""
    local, num = one.found.region.num_local_experts, one.plan.num_chunks
    if one.plan.by_tokens:
        return Cut((0, local), slices=num)
    edges = (0, *(chunk.stop for chunk in chunk_bounds(local, num)))
    return Cut(edges, slices=one.plan.hop_slices)


def _rank_in(group: str) -> int:
    return dist.get_rank(dist.distributed_c10d._resolve_process_group(group))


def _emit_capacity(one: PlannedCapacity) -> Callable[[], None]:
    """Emit experts with a capacity in chunks; return what puts them in the place of the old."""
    region = one.found.region
    bounds = chunk_bounds(region.num_local_experts, one.plan.num_chunks)
    result = emit_capacity_chunks(region, bounds)
    return lambda: replace_uses({region.result: result})


def _emit_attention(region: AttentionRegion, num_groups: int) -> Callable[[], None]:
    """Emit attention in groups of heads; return what puts it in the place of the old one."""
    result = emit_head_groups(region, num_groups)
    return lambda: replace_uses({region.result: result})
