"""Decide where chunks of experts begin and end: at even distances, or where rows say it.

Contract
    By load where the option asks for it, or a price under `routing_skew` does, and every chunk runs
    the same nodes whatever its experts. Under that price the number of chunks is decided again.
"""

from __future__ import annotations

from typing import Final

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.journal.reasons import Reason
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.chunk_numbers import ONE_CHUNK, plan_num_chunks
from moe_compile.plan.decide_uneven import FlatExchange, decide_uneven
from moe_compile.plan.state import CompileState
from moe_compile.regions.regions import Refused, RowProof
from moe_compile.regions.token_regions import NotFound
from passes.planned.draft import Draft

NO_SKEW: Final = "routing_skew is 0: experts are taken to be chosen evenly"

OF_TOKENS: Final = "chunks are of tokens"


def decide_edges(draft: Draft, state: CompileState, layer: TracedNodes) -> None:
    """Note whether chunks of a region have edges by load, and if that is open but not done, why."""
    decision = _decide(draft, state, layer)
    edges = state.config.chunk_edges
    if edges == "even":
        return
    draft.even_edges = _why_even(draft)
    if draft.even_edges is None and edges == "auto":
        draft.even_edges = _by_price(draft, decision, state.config)
    draft.by_load = draft.even_edges is None


def _decide(draft: Draft, state: CompileState, layer: TracedNodes) -> Decision | None:
    """Decide on a flat exchange by a price of uneven routing, where there is one."""
    is_flat = draft.gathered is None and draft.divided is None
    if not is_flat or isinstance(draft.proof, Refused) or draft.by_tokens:
        return None
    exchange = FlatExchange(
        num_chunks=draft.num_chunks,
        decision=draft.decision,
        rows_per_token=1 if draft.costs is None else draft.costs.rows_per_token,
        may_follow_loads=not _is_bound(draft.proof),
    )
    decision = decide_uneven(draft.found, state.config, state.hardware, layer, exchange)
    if decision is not None:
        number = plan_num_chunks(state.config, draft.region, decision)
        draft.decision, (draft.num_chunks, draft.not_chunked) = decision, number
    return decision


def _by_price(draft: Draft, decision: Decision | None, config: MegaMoEConfig) -> NotFound | None:
    """Return why "auto" leaves edges even, or None where it does not."""
    if draft.by_tokens:
        return NotFound(reason=Reason.BY_PRICE, detail=OF_TOKENS)
    if not config.routing_skew:
        return NotFound(reason=Reason.BY_PRICE, detail=NO_SKEW)
    if decision is None:
        return NotFound(reason=Reason.NO_PRICE)
    by_load = decision.chosen.candidate.chunk_edges == "load"
    return None if by_load else NotFound(reason=Reason.BY_PRICE)


def _why_even(draft: Draft) -> NotFound | None:
    """Return what stands against edges by load."""
    if draft.gathered is not None:
        return NotFound(reason=Reason.GATHERED, detail="no chunk has experts of its own")
    if draft.divided is not None:
        return NotFound(reason=Reason.TWO_HOPS)
    if isinstance(draft.proof, Refused):
        return NotFound(reason=Reason.NOT_PROVEN)
    if draft.num_chunks == 1:
        return draft.not_chunked or ONE_CHUNK
    if draft.num_chunks == draft.region.num_local_experts:
        return NotFound(reason=Reason.ALREADY_DONE, detail="each chunk is one expert")
    return NotFound(reason=Reason.EXPERTS_NAMED) if _is_bound(draft.proof) else None


def _is_bound(proof: RowProof) -> bool:
    """Whether which experts a chunk has must be known when compiling."""
    named = proof.expert_rows or proof.writes or proof.whole
    return bool(named) or any(len(set(padding)) > 1 for padding in proof.padding.values())
