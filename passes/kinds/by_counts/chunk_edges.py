"""Decide where chunks of experts begin and end: at even distances, or by the experts' rows.

Contract
    Edges go by load where the option asks for it, or a price under `routing_skew` does, and every
    chunk runs the same nodes whatever its experts. Under that price the number of chunks is decided
    again.

With `routing_skew` the planner chooses the chunks of a flat exchange, and their edges.
The decision is None where nothing is left to choose, or where ranks might decide apart. It is a
function of graph, options, profile and size of the group.
The number format of rows is decided before, by prices of even routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.rates import Rates
from moe_compile.cost.read_regions import work_of_experts
from moe_compile.cost.region_work import RegionWork
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.hardware import HardwareProfile
from moe_compile.journal.reasons import Left, Reason
from moe_compile.plan.candidates import CHUNKS, Candidate
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.chunk_numbers import ONE_CHUNK, plan_num_chunks
from moe_compile.plan.decide import named_wire, room_bytes
from moe_compile.plan.planned import FoundExperts
from moe_compile.plan.state import CompileState
from moe_compile.plan.uneven_price import EDGES, RoutingSkew, Uneven, choose_uneven
from moe_compile.regions.regions import RowProof
from passes.kinds.by_counts.draft import Draft

NO_SKEW: Final = (
    "routing_skew is 0, which says that experts are chosen evenly, so chunks of equal size "
    "have equal rows"
)

OF_TOKENS: Final = "chunks are of tokens"


def decide_edges(draft: Draft, state: CompileState, layer: TracedNodes) -> None:
    """Note whether a region's chunks have edges by load; if that is open but not done, note why."""
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
    is_flat = draft.gathered is None and draft.two_hops is None
    if not is_flat or isinstance(draft.proof, Left) or draft.by_tokens or draft.waits:
        return None
    exchange = FlatExchange(
        num_chunks=draft.num_chunks,
        decision=draft.decision,
        rows_per_token=1 if draft.costs is None else draft.costs.rows_per_token,
        may_follow_loads=not _is_bound(draft.proof),
    )
    decision = decide_uneven(draft.found, state.config, state.hardware, layer, exchange)
    if decision is not None:
        number = plan_num_chunks(state.config, draft.region.num_local_experts, decision)
        draft.decision, (draft.num_chunks, draft.not_chunked) = decision, number
    return decision


def _by_price(draft: Draft, decision: Decision | None, config: MegaMoEConfig) -> Left | None:
    """Return why "auto" leaves edges even, or None where it does not."""
    if draft.by_tokens:
        return Left(Reason.BY_PRICE, OF_TOKENS)
    if not config.routing_skew:
        return Left(Reason.BY_PRICE, NO_SKEW)
    if decision is None:
        return Left(Reason.NO_PRICE)
    by_load = decision.chosen.candidate.chunk_edges == "load"
    return None if by_load else Left(Reason.BY_PRICE)


def _why_even(draft: Draft) -> Left | None:
    """Return the reason against edges by load."""
    if draft.gathered is not None:
        return Left(
            Reason.GATHERED, "chunks are not of experts, so they have no edges between experts"
        )
    if draft.two_hops is not None:
        return Left(Reason.TWO_HOPS)
    if isinstance(draft.proof, Left):
        return Left(Reason.NOT_PROVEN)
    if draft.num_chunks == 1:
        return draft.not_chunked or ONE_CHUNK
    if draft.num_chunks == draft.region.num_local_experts:
        return Left(Reason.ALREADY_DONE, "each chunk is one expert, so its edges cannot move")
    return Left(Reason.EXPERTS_NAMED) if _is_bound(draft.proof) else None


def _is_bound(proof: RowProof) -> bool:
    """Whether the experts of a chunk must be known when compiling."""
    named = proof.expert_rows or proof.writes or proof.whole
    return bool(named) or any(len(set(padding)) > 1 for padding in proof.padding.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatExchange:
    """A region whose rows are exchanged flat, before its chunks have edges."""

    num_chunks: int
    """Number by options and the decision; where `chunks` is "auto", to be decided once more."""
    decision: Decision | None
    """Decision on even routing; None where nothing else was left to the planner."""
    rows_per_token: int
    may_follow_loads: bool
    """Whether edges by load can be made."""


def decide_uneven(
    found: FoundExperts,
    config: MegaMoEConfig,
    hardware: HardwareProfile,
    layer: TracedNodes,
    exchange: FlatExchange,
) -> Decision | None:
    """Return the number of chunks of a flat exchange, and their edges, under `routing_skew`.

    None where the option is 0 or leaves nothing open, and for experts written out one by one.
    """
    is_open = "auto" in (config.chunks, config.chunk_edges)
    if not (config.routing_skew and config.equal_tokens and is_open):
        return None
    if isinstance(found.proof, Left) or found.proof.expert_rows:
        return None
    numbers: tuple[int, ...] = (exchange.num_chunks,)
    if config.chunks == "auto":
        numbers = tuple(num for num in CHUNKS if found.region.num_local_experts % num == 0)
    if (
        numbers == (1,)
        or (work := work_of_experts(found.region, found.proof, hardware, layer)) is None
    ):
        return None
    asked = EDGES if config.chunk_edges == "auto" else (config.chunk_edges,)
    uneven = Uneven(
        routing=RoutingSkew(skew=config.routing_skew, rows_per_token=exchange.rows_per_token),
        exchanged=_exchanged(exchange.decision, config, work),
        numbers=numbers,
        edges=asked if exchange.may_follow_loads else EDGES[:1],
    )
    return choose_uneven(work, Rates.of(hardware, work.num_ranks), uneven, room_bytes(work, config))


def _exchanged(decision: Decision | None, config: MegaMoEConfig, work: RegionWork) -> Candidate:
    """Return how rows travel: as decided, or as options name it where nothing was."""
    if decision is None:
        wires = [
            named_wire("dispatch", config.dispatch_wire, work),
            named_wire("combine", config.combine_wire, work),
        ]
    else:
        wires = [decision.chosen.candidate.dispatch_wire, decision.chosen.candidate.combine_wire]
    return Candidate(dispatch_wire=wires[0], combine_wire=wires[1])
