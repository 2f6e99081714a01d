"""What `routing_skew` leaves to the planner of a flat exchange: its chunks, and their edges.

Contract
    None where nothing is left to it, or where ranks might decide apart.
    A function of graph, options, profile and size of the group.
    How rows travel is decided before, by prices of even routing.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.rates import Rates
from moe_compile.cost.read_regions import work_of_experts
from moe_compile.cost.region_work import RegionWork
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.hardware import HardwareProfile
from moe_compile.plan.candidates import CHUNKS, Candidate
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.choose_uneven import EDGES, Uneven, choose_uneven
from moe_compile.plan.decide import named_wire, room_bytes
from moe_compile.plan.planned import FoundExperts
from moe_compile.plan.uneven_price import Routing
from moe_compile.regions.regions import Refused


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatExchange:
    """What is known of a region that is exchanged flat, before its chunks have edges."""

    num_chunks: int
    """As options and the decision say; where `chunks` is "auto", to be decided once more."""
    decision: Decision | None
    """On even routing; None where nothing else was left to the planner."""
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

    None where that is 0 or leaves nothing open, and of experts that are written out one by one.
    """
    is_open = "auto" in (config.chunks, config.chunk_edges)
    if not (config.routing_skew and config.equal_tokens and is_open):
        return None
    if isinstance(found.proof, Refused) or found.proof.expert_rows:
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
        routing=Routing(skew=config.routing_skew, rows_per_token=exchange.rows_per_token),
        exchanged=_exchanged(exchange.decision, config, work),
        numbers=numbers,
        edges=asked if exchange.may_follow_loads else EDGES[:1],
    )
    return choose_uneven(work, Rates.of(hardware, work.num_ranks), uneven, room_bytes(work, config))


def _exchanged(decision: Decision | None, config: MegaMoEConfig, work: RegionWork) -> Candidate:
    """Return how rows travel: as was decided, else as options name."""
    if decision is None:
        wires = [
            named_wire("dispatch", config.dispatch_wire, work),
            named_wire("combine", config.combine_wire, work),
        ]
    else:
        wires = [decision.chosen.candidate.dispatch_wire, decision.chosen.candidate.combine_wire]
    return Candidate(dispatch_wire=wires[0], combine_wire=wires[1])
