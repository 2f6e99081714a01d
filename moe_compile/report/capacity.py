"""What a report says of experts with a capacity.

Contract
    Plain data: names, numbers, reasons.
"""

from __future__ import annotations

from typing import Final

from moe_compile.journal.kinds import Kind
from moe_compile.journal.remedies import REMEDIES, changes_for
from moe_compile.plan.chunk_numbers import last_bits_remark
from moe_compile.plan.planned import PlannedCapacity
from moe_compile.report.decisions import decision_figures, decision_remarks
from moe_compile.report.region_reports import CHUNKED, LEFT_WHOLE, RegionReport, edges_remarks

OF_CAPACITY: Final = "experts with a capacity: equal parts are exchanged, the host reads nothing"


def capacity_report(one: PlannedCapacity) -> RegionReport:
    """Return what became of experts with a capacity."""
    region, why = one.found.region, one.left.get("chunks")
    unproven = why if why is not None and why.reason.kind is Kind.UNPROVEN else None
    remarks = [why.why] if why is not None and unproven is None else []
    remarks += decision_remarks(one.decision)
    remarks += [f"not decided by price: {one.not_priced}"] if one.not_priced else []
    remarks += edges_remarks(one.left)
    others = [(n, left) for n, left in one.left.items() if n not in ("chunks", "chunk_edges")]
    remarks += [f"{name} is not done: {left.why}" for name, left in others if left.is_asked]
    if one.is_rewritten and one.last_bits:
        remarks.append(last_bits_remark(one.last_bits))
    remarks.append(OF_CAPACITY)
    return RegionReport(
        name=region.name,
        where=one.found.where,
        num_ranks=region.num_ranks,
        num_local_experts=region.num_local_experts,
        num_chunks=one.plan.num_chunks,
        num_host_reads=0,
        verdict=unproven.why if unproven else CHUNKED if one.is_rewritten else LEFT_WHOLE,
        remedy=REMEDIES[unproven.reason] if unproven else "",
        sized_by="capacity",
        decision=decision_figures(one.decision),
        remarks=tuple(remarks),
        to_do=changes_for(left.reason for left in one.left.values()),
    )
