"""What a report says of experts that pick rows of tokens which the model gathers.

Contract
    Plain data: names, numbers, reasons.
"""

from __future__ import annotations

from typing import Final

from moe_compile.journal.remedies import changes_for
from moe_compile.plan.chunk_numbers import Bound
from moe_compile.plan.planned import PlannedPicking
from moe_compile.report.region_reports import CHUNKED, LEFT_WHOLE, RegionReport

IN_SLICES: Final = "tokens are gathered, and their sums reduced, slice by slice"
AT_ONCE: Final = (
    "tokens are gathered at once, since others read them too; their sums are reduced slice by slice"
)


def picking_report(one: PlannedPicking) -> RegionReport:
    """Return what became of experts that pick rows of gathered tokens."""
    region, why = one.found.region, one.left.get("chunks")
    remarks = [why.why] if why is not None else []
    if one.is_rewritten:
        remarks += [IN_SLICES if region.is_alone else AT_ONCE, Bound.BY_SLICES.value]
    return RegionReport(
        name=region.name,
        where=one.found.where,
        num_ranks=region.num_ranks,
        num_local_experts=region.num_local_experts,
        num_chunks=one.plan.num_chunks,
        num_host_reads=region.num_reads_in_slices if one.is_rewritten else region.num_host_reads,
        verdict=CHUNKED if one.is_rewritten else LEFT_WHOLE,
        sized_by="gather",
        num_tokens=one.plan.num_tokens,
        remarks=tuple(remarks),
        to_do=changes_for(left.reason for left in one.left.values()),
    )
