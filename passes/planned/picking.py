"""Decide in how many slices of tokens experts run that pick rows of gathered tokens.

Contract
    The graph is as the model wrote it, and is not edited.
    Decisions follow from graph and options: the same on every rank. No price is asked: how many
    rows there are is not known when compiling.
"""

from __future__ import annotations

from moe_compile.journal.entries import Verdict, judged
from moe_compile.plan.chunk_numbers import plan_slices
from moe_compile.plan.plan import PickingPlan
from moe_compile.plan.planned import FoundPicking, PlannedPicking
from moe_compile.plan.state import CompileState


def plan_picking(state: CompileState) -> tuple[PlannedPicking, ...]:
    """Return the plan of all that `state.found` has of this kind."""
    return tuple(_planned(one, state) for one in state.found.picking)


def _planned(found: FoundPicking, state: CompileState) -> PlannedPicking:
    config, region = state.config, found.region
    num_chunks, reason = plan_slices(config, region.num_tokens)
    verdict = Verdict(candidate=region.name, reason=reason, where=found.where) if reason else None
    return PlannedPicking(
        found=found,
        plan=PickingPlan(
            group=region.group,
            num_ranks=region.num_ranks,
            num_local_experts=region.num_local_experts,
            num_chunks=num_chunks,
            num_tokens=region.num_tokens,
        ),
        left={"chunks": judged(config, "chunks", verdict)} if verdict is not None else {},
    )
