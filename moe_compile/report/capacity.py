"""What a report says of experts with a capacity.

Contract
    Plain data: names, numbers, reasons.
"""

from __future__ import annotations

from typing import Final

from moe_compile.journal.reasons import Kind
from moe_compile.plan.planned import PlannedCapacity
from moe_compile.report.decisions import decision_figures, decision_remarks
from moe_compile.report.region_report import RegionReport

OF_CAPACITY: Final = "experts with a capacity: equal parts are exchanged, the host reads nothing"


def capacity_report(one: PlannedCapacity) -> RegionReport:
    """Return what became of experts with a capacity."""
    region, why = one.found.region, one.left.get("chunks")
    is_unproven = why is not None and why.reason.kind is Kind.UNPROVEN
    remarks = [OF_CAPACITY]
    remarks += [why.why] if why is not None and not is_unproven else []
    remarks += decision_remarks(one.decision)
    remarks += [f"not decided by price: {one.not_priced}"] if one.not_priced else []
    others = [(name, left) for name, left in one.left.items() if name != "chunks"]
    remarks += [f"{name} is not done: {left.why}" for name, left in others if left.is_asked]
    verdict = "chunked" if one.is_rewritten else "left whole"
    return RegionReport(
        name=region.name,
        where=one.found.where,
        num_ranks=region.num_ranks,
        num_local_experts=region.num_local_experts,
        num_chunks=one.plan.num_chunks,
        num_host_reads=0,
        verdict=why.why if why is not None and is_unproven else verdict,
        sized_by="capacity",
        decision=decision_figures(one.decision),
        remarks=tuple(remarks),
    )
