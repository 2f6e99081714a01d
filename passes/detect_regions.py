"""Find the MoE regions of a graph and prove which may be replayed.

Contract
    Requires  WAITS_VISIBLE.
    Provides  REGIONS_FOUND.
    Keeps     the graph; notes on the exchanges of each region that they are of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from moe_compile.analysis.detect_moe import find_moe_regions
from moe_compile.analysis.host_reads import count_host_reads
from moe_compile.analysis.regions import Refused
from moe_compile.analysis.row_proof import prove_rows_independent
from moe_compile.graph.query import source_place, tensor_of
from moe_compile.planning.state import CompileState, Exchange, RegionPlan
from passes.contract import Fact, GraphPass, PassReport, verdict


@dataclass(frozen=True)
class DetectRegions(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "detect_regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.WAITS_VISIBLE})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_FOUND})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Fill `state.plans` with a plan of one chunk per region, `state.decoys` with the rest."""
        regions, decoys = find_moe_regions(graph)
        state.plans = [
            RegionPlan(
                region=region,
                proof=prove_rows_independent(region),
                where=source_place(region.dispatch),
                num_host_reads=count_host_reads(region),
                dispatch=_exchange("dispatch", region.dispatch),
                combine=_exchange("combine", region.combine),
            )
            for region in regions
        ]
        state.decoys = decoys
        for region in regions:
            state.tell_apart((region.dispatch, region.combine))
        refused = [plan.proof for plan in state.plans if isinstance(plan.proof, Refused)]
        names = {r.candidate for r in refused}
        return PassReport(
            pass_name=self.name,
            applied=tuple(r.name for r in regions if r.name not in names),
            skipped=tuple(verdict(r) for r in (*refused, *decoys)),
        )


def _exchange(name: str, launch: fx.Node) -> Exchange:
    payload = launch.args[0]
    assert isinstance(payload, fx.Node)
    rows = tensor_of(payload)
    before = _bytes_of_row(rows)
    return Exchange(
        name=name, launches=(launch,), rows=rows, row_bytes=before, row_bytes_before=before
    )


def _bytes_of_row(rows: torch.Tensor | None) -> int:
    widths = () if rows is None else rows.shape[1:]
    if rows is None or any(isinstance(width, torch.SymInt) for width in widths):
        return 0
    return math.prod(widths) * rows.element_size()
