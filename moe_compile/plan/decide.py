"""The choices that options leave to the planner, and its decision for one region.

Contract
    None where nothing is left to it, or where ranks might decide apart: without the promise of
    `equal_tokens` the sizes in a graph are this rank's own.
    A function of graph, options, profile and size of the group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.hop_shape import HopShape
from moe_compile.cost.rates import Rates
from moe_compile.cost.read_regions import work_of_experts
from moe_compile.cost.region_work import RegionWork, Room
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.hardware import HardwareProfile
from moe_compile.journal.reasons import Left
from moe_compile.plan.candidates import (
    CHUNKS,
    FORWARD_ALONE,
    HOP_SLICES,
    WIRES,
    Candidate,
    list_candidates,
)
from moe_compile.plan.choose_plan import Decision, Price, choose_plan
from moe_compile.plan.dispatch_rules import Rounding, quantises_rows
from moe_compile.plan.node_rounding import NodeRounding
from moe_compile.plan.planned import FoundExperts
from moe_compile.plan.region_tasks import price_us
from moe_compile.plan.uneven_price import choose_uneven


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathering:
    """The work and the rounding of a region with its tokens gathered."""

    work: RegionWork | None
    rounding: Rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoHops:
    """The messages of a region in two hops, and whether its results may round."""

    shape: HopShape
    can_be_exact: bool
    rounding: NodeRounding | None
    """Rounding of sums on the nodes; None where sums may not be made there."""
    weighted: frozenset[str] = frozenset()
    """Those of `dispatch` and `combine` whose messages in eight bits pack other numbers than the
    flat exchange."""


def decide_experts(
    found: FoundExperts,
    config: MegaMoEConfig,
    hardware: HardwareProfile,
    layer: TracedNodes | None = None,
    gathering: Gathering | None = None,
    two_hops: TwoHops | None = None,
    never_packed: frozenset[str] = frozenset(),
    room: Room | None = None,
) -> Decision | None:
    """Return the decision for a MoE region in its `layer`, or in all of its graph.

    Without `gathering` its tokens cannot be gathered, without `two_hops` not sent in two hops;
    `never_packed` are those of `dispatch` and `combine` whose rows must not be rounded. With `room`
    rows travel in such buffers, in chunks of tokens.
    """
    if not asks_planner(config, can_gather=gathering is not None, can_hop=two_hops is not None):
        return None
    if isinstance(found.proof, Left):
        return None
    work = work_of_experts(found.region, found.proof, hardware, layer)
    if work is None:
        return None
    work = replace(work, never_packed=never_packed, room=room)
    if gathering is not None:
        two_hops = two_hops if config.nodes == "auto" else None
        is_bitwise = gathering.rounding.is_bitwise
        work = replace(work, gathered=gathering.work, gather_is_bitwise=is_bitwise)
        if config.dispatch == "all_gather" and work.gathered is None:
            return None
    rounding = gathering.rounding if gathering is not None else None
    if two_hops is not None:
        work = replace(work, hops=two_hops.shape, weighted=two_hops.weighted)
    may_split = not found.proof.whole
    rule = experts_rule(config, work, rounding, two_hops, may_split_rows=may_split)
    axes = ("experts", "tokens") if room is None else ("tokens",)
    return choose(work, axes, rule, config, hardware)


def asks_planner(config: MegaMoEConfig, *, can_gather: bool, can_hop: bool = False) -> bool:
    """Whether the options leave a choice for a MoE region that the planner may make."""
    left = [config.chunks, config.dispatch_wire, config.combine_wire]
    left += [config.dispatch] if can_gather else []
    left += [config.nodes, config.hop_slices] if can_hop else []
    return config.equal_tokens and "auto" in left


def experts_rule(
    config: MegaMoEConfig,
    work: RegionWork,
    rounding: Rounding | None = None,
    two_hops: TwoHops | None = None,
    *,
    may_split_rows: bool = False,
) -> Callable[[Candidate], bool]:
    """Return a predicate: whether the options allow a candidate for a MoE region.

    `numerics` bounds the changes by "auto". `may_split_rows`: nothing needs all rows of an expert.
    """
    axes = _axes(config, may_split_rows=may_split_rows)
    gathers = rounding is not None and may_gather(config, rounding)

    def is_gather_allowed(candidate: Candidate) -> bool:
        if not gathers or work.gathered is None:
            return False
        if config.chunk_by != "tokens":
            return candidate.num_chunks == 1
        return _is_asked(candidate.num_chunks, config.chunks, work.gathered.num_parts)

    def is_allowed(candidate: Candidate) -> bool:
        if candidate.nodes != "off":
            return two_hops is not None and may_hop(config, candidate, two_hops, work)
        if two_hops is not None and config.nodes not in ("off", "auto"):
            return False
        if candidate.dispatch == "all_gather":
            return is_gather_allowed(candidate)
        return (
            not (gathers and config.dispatch == "all_gather")
            and (candidate.num_chunks == 1 or candidate.chunk_by in axes)
            and _is_asked(candidate.num_chunks, config.chunks, work.num_parts)
            and _is_wired(candidate, work, config)
        )

    return is_allowed


def _axes(config: MegaMoEConfig, *, may_split_rows: bool) -> tuple[str, ...]:
    """Return the axes that chunks may have: both if the number and the edges are open too."""
    if config.chunk_by != "auto":
        return (config.chunk_by,)
    is_open = config.chunks == "auto" and config.chunk_edges == "even" and may_split_rows
    return ("experts", "tokens") if is_open and config.allows("bounded") else ("experts",)


def may_gather(config: MegaMoEConfig, rounding: Rounding) -> bool:
    """Whether the options let the planner gather tokens: "auto" rounds as `numerics` allows."""
    if config.dispatch != "auto":
        return config.dispatch == "all_gather"
    return config.allows(rounding.numerics) and not quantises_rows(config)


def may_hop(
    config: MegaMoEConfig, candidate: Candidate, two_hops: TwoHops, work: RegionWork
) -> bool:
    """Whether the options let the planner send a region in two hops as a candidate says.

    Two hops in slices alone, asked for by `chunk_by`, have no price.
    """
    parts = candidate.num_chunks, candidate.hop_slices
    if config.chunk_by == "tokens":
        is_asked = parts == (1, 1) and (config.nodes != "auto" or config.chunks in ("auto", 1))
    else:
        slices = config.hop_slices if config.hop_slices in HOP_SLICES else 1
        is_asked = _is_asked(parts[0], config.chunks, work.num_parts)
        is_asked &= config.hop_slices == "auto" or parts[1] == slices
    is_asked &= _is_wired(candidate, work, config)
    if config.nodes != "auto":
        return is_asked and config.nodes == candidate.nodes
    if not is_asked or config.dispatch == "all_gather" or _repacks(config, candidate, two_hops):
        return False
    if candidate.nodes == "exact":
        return two_hops.can_be_exact
    return two_hops.rounding is not None and config.allows(two_hops.rounding.numerics)


def _repacks(config: MegaMoEConfig, candidate: Candidate, two_hops: TwoHops) -> bool:
    """Whether hops in eight bits would round unlike the flat exchange, and may not.

    Sums of nodes are packed again; weighted rows are packed without their weights.
    """
    if config.allows("lossy"):
        return False
    wires = {"dispatch": candidate.dispatch_wire, "combine": candidate.combine_wire}
    packed = {name for name, wire in wires.items() if wire != "same"}
    weighted = two_hops.weighted - ({"combine"} if wires["combine"] == FORWARD_ALONE else set())
    return bool(packed & weighted) or (candidate.nodes == "rounded" and bool(packed))


def _is_asked(num_chunks: int, option: int | str, num_parts: int) -> bool:
    """Whether the option allows so many chunks; one chunk stands for numbers that are not tried."""
    if option == "auto":
        return True
    is_tried = option in CHUNKS and num_parts % int(option) == 0
    return num_chunks == (option if is_tried else 1)


def _is_wired(candidate: Candidate, work: RegionWork, config: MegaMoEConfig) -> bool:
    """Whether the options allow the communication dtypes of a candidate."""
    wires = (
        ("dispatch", candidate.dispatch_wire, config.dispatch_wire),
        ("combine", candidate.combine_wire, config.combine_wire),
    )
    return all(_is_wire(*wire, work, config) for wire in wires)


def _is_wire(
    exchange: str, wire: str, option: str, work: RegionWork, config: MegaMoEConfig
) -> bool:
    """Whether the option of an exchange allows it a communication dtype that is tried."""
    if option == "auto":
        return wire == "same" or (wire in WIRES and config.allows("lossy"))
    return wire == named_wire(exchange, option, work)


def named_wire(exchange: str, option: str, work: RegionWork) -> str:
    """Return the communication dtype that the option of an exchange names for rows of `work`."""
    is_packed = "fp8" in work.wire_shares and exchange not in work.never_packed
    return option if is_packed and option != "auto" else "same"


def room_bytes(work: RegionWork, config: MegaMoEConfig) -> float:
    """Return the bytes that may be added to the peak."""
    return config.max_memory_increase * max(float(config.step_peak_bytes), work.written_bytes)


def wires_tried(config: MegaMoEConfig) -> tuple[str, ...]:
    """Return the communication dtypes that are tried: those of "auto", and any that is named."""
    named = FORWARD_ALONE in (config.dispatch_wire, config.combine_wire)
    return (*WIRES, FORWARD_ALONE) if named else WIRES


def choose(
    work: RegionWork,
    axes: tuple[str, ...],
    is_allowed: Callable[[Candidate], bool],
    config: MegaMoEConfig,
    hardware: HardwareProfile,
) -> Decision:
    """Return the decision among the candidates for `work` that are allowed.

    `axes` are the axes that chunks may have.
    """
    candidates = list_candidates(work, axes, wires_tried(config))
    allowed = frozenset(filter(is_allowed, candidates))
    rates = Rates.of(hardware, work.num_ranks, work.hops.num_local if work.hops else 0)
    return _chosen(work, rates, candidates, allowed, room_bytes(work, config))


def forget() -> None:
    """Forget the decisions of this process: equal work is decided on once."""
    _chosen.cache_clear()
    _price_of.cache_clear()
    choose_uneven.cache_clear()


@functools.lru_cache(maxsize=64)
def _chosen(
    work: RegionWork,
    rates: Rates,
    candidates: tuple[Candidate, ...],
    allowed: frozenset[Candidate],
    allowed_bytes: float,
) -> Decision:
    """Return the decision; equal layers of a model have equal work."""
    room, price = allowed_bytes, _price_of(work)
    return choose_plan(
        work, rates, candidates, allowed.__contains__, allowed_bytes=room, price=price
    )


@functools.lru_cache(maxsize=16)
def _price_of(work: RegionWork) -> Price:
    """Return a cached price of candidates of `work`: other options ask for the same ones."""
    known = functools.lru_cache(maxsize=None)(functools.partial(price_us, work))

    def price(asked: RegionWork, candidate: Candidate, rates: Rates) -> float:
        del asked  # always `work`
        return known(candidate, rates)

    return price
