"""What the options leave to the planner, and its decision for one region.

Contract
    None where nothing is left to it, or where ranks might decide apart: without the promise of
    `equal_tokens` the sizes in a graph are this rank's own.
    A function of graph, options, profile and size of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moe_compile.analysis.attention_regions import AttentionRegion
from moe_compile.analysis.regions import MoERegion, Refused
from moe_compile.analysis.token_regions import Unswitched
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import HardwareProfile
from moe_compile.planning.candidates import CHUNKS, Candidate, list_candidates
from moe_compile.planning.choose_plan import Decision, choose_plan
from moe_compile.planning.rates import Rates
from moe_compile.planning.read_regions import work_of_attention, work_of_experts
from moe_compile.planning.region_work import RegionWork
from moe_compile.planning.state import RegionPlan

COULD_GATHER = (Unswitched.NOT_ASKED, Unswitched.LOSSY, Unswitched.NOT_WORTHWHILE)
"""Why a region is not all-gathered although it might be."""


def decide_experts(
    plan: RegionPlan,
    others: Iterable[MoERegion],
    config: MegaMoEConfig,
    hardware: HardwareProfile,
) -> Decision | None:
    """Return the decision for a MoE region; `others` are those of its graph."""
    asks = "auto" in (config.chunks, config.dispatch_wire, config.combine_wire)
    if not asks or not config.equal_tokens or isinstance(plan.proof, Refused):
        return None
    costs = plan.switch.costs if plan.switch.reason in COULD_GATHER else None
    work = work_of_experts(plan.region, plan.proof, others, costs)
    if work is None:
        return None
    axes = ("experts", "tokens")
    return _choose(work, axes, experts_rule(config, work), config, hardware)


def decide_attention(
    region: AttentionRegion, config: MegaMoEConfig, hardware: HardwareProfile
) -> Decision | None:
    """Return the decision for an attention region."""
    if config.attention_chunks != "auto" or not config.equal_tokens:
        return None
    work = work_of_attention(region)
    if work is None:
        return None
    return _choose(work, ("heads",), lambda _: True, config, hardware)


def experts_rule(config: MegaMoEConfig, work: RegionWork) -> Callable[[Candidate], bool]:
    """Return which ways to run a MoE region the options allow."""
    axis = "tokens" if config.chunk_by == "tokens" else "experts"

    def is_allowed(candidate: Candidate) -> bool:
        wires = (
            (candidate.dispatch_wire, config.dispatch_wire),
            (candidate.combine_wire, config.combine_wire),
        )
        return (
            candidate.dispatch == "all_to_all"
            and (candidate.num_chunks == 1 or candidate.chunk_by == axis)
            and _is_asked(candidate.num_chunks, config.chunks, work.num_parts)
            and all(_is_wire(wire, option, work) for wire, option in wires)
        )

    return is_allowed


def _is_asked(num_chunks: int, option: int | str, num_parts: int) -> bool:
    """Whether the option allows so many chunks; one stands for numbers that are not tried."""
    if option == "auto":
        return True
    is_tried = option in CHUNKS and num_parts % int(option) == 0
    return num_chunks == (option if is_tried else 1)


def _is_wire(wire: str, option: str, work: RegionWork) -> bool:
    if option == "auto":
        return True
    return wire == ("fp8" if option != "same" and "fp8" in work.wire_shares else "same")


def _choose(
    work: RegionWork,
    axes: tuple[str, ...],
    is_allowed: Callable[[Candidate], bool],
    config: MegaMoEConfig,
    hardware: HardwareProfile,
) -> Decision:
    peak = max(float(config.step_peak_bytes), work.written_bytes)
    return choose_plan(
        work,
        Rates.of(hardware, work.num_ranks),
        list_candidates(work, axes),
        is_allowed,
        allowed_bytes=config.max_memory_increase * peak,
    )
