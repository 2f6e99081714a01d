"""Find the MoE regions, by counts and by capacity, and the attention of a graph; prove them.

Contract
    Requires  WAITS_VISIBLE.
    Provides  REGIONS_FOUND.
    Keeps     the graph; notes on the exchanges of each region that they are of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from moe_compile.attention.attention_regions import AttentionRefused, AttentionRegion
from moe_compile.attention.detect_attention import find_attention
from moe_compile.capacity.capacity_regions import CapacityRegion
from moe_compile.capacity.detect_capacity import find_capacity_regions
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.inner_graphs import is_autograd_function
from moe_compile.graph.launch_order import mark_region
from moe_compile.graph.query import source_place, tensor_of
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.plan.planned import (
    Findings,
    FoundAttention,
    FoundCapacity,
    FoundExperts,
)
from moe_compile.plan.state import CompileState
from moe_compile.proof.row_proof import prove_rows_independent
from moe_compile.regions.detect_moe import find_moe_regions
from moe_compile.regions.host_reads import count_host_reads
from moe_compile.regions.regions import MoERegion, Refused
from passes.contract import Fact, GraphPass
from passes.normalize.function_exchanges import Unknown, exchanges_of


@dataclass(frozen=True)
class DetectRegions(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "detect_regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.WAITS_VISIBLE})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_FOUND})
    after: ClassVar[frozenset[str]] = frozenset({"split_batch"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Fill `state.found`; a region that a proof refuses is found all the same."""
        regions, others = find_moe_regions(graph)
        attention, without = find_attention(graph)
        taken = {launch for region in attention for launch in region.launches}
        first = len(regions) + sum(other.is_region for other in others)
        even = find_capacity_regions(graph, taken, first)
        matched = {*even.exchanges, *(launch.name for launch in taken)}
        state.found = Findings(
            experts=tuple(_experts(region, state.config) for region in regions),
            attention=(*map(_attention, attention), *map(_attention, without)),
            capacity=tuple(map(_capacity, even.regions)),
            others=(
                *(other for other in others if other.candidate not in matched),
                *even.refused,
                *_inside_functions(graph),
            ),
        )
        for marked in (
            *(region.launches for region in regions),
            *(a.launches for a in attention),
            *(c.launches for c in even.regions),
        ):
            state.num_marked += 1
            mark_region(marked, str(state.num_marked))
        return PassReport(
            pass_name=self.name,
            applied=(
                *_names(regions),
                *_names(even.regions),
                *_names(attention),
            ),
            skipped=(
                *(_verdict(graph, other, state.config) for other in state.found.others),
                *(Verdict(candidate=a.name, reason=a.reason, detail=a.detail) for a in without),
            ),
        )


def _inside_functions(graph: fx.Graph) -> Iterator[Refused]:
    """Yield a refusal for each exchange that is still inside an autograd function."""
    for node in filter(is_autograd_function, graph.nodes):
        found = exchanges_of(node)
        if isinstance(found, Unknown):
            yield Refused(candidate=node.name, reason=found.reason, detail=found.because)


def _names(regions: Iterable[MoERegion | AttentionRegion | CapacityRegion]) -> list[str]:
    return [region.name for region in regions]


def _verdict(graph: fx.Graph, other: Refused, config: MegaMoEConfig) -> Verdict:
    """Say of an exchange why it is of no region: one that dispatches rows was meant to be."""
    options = ("chunks", "dispatch", "dispatch_wire", "combine_wire") if other.is_region else ()
    option = next(filter(config.asks_for, options or ("chunks",)), "")
    return Verdict(
        candidate=other.candidate,
        reason=other.reason,
        detail=other.detail,
        option=option,
        is_asked=bool(option),
        where=next((source_place(n) for n in graph.nodes if n.name == other.candidate), ""),
    )


def _experts(region: MoERegion, config: MegaMoEConfig) -> FoundExperts:
    rows = {"dispatch": _payload(region.dispatch), "combine": _payload(region.combine)}
    return FoundExperts(
        region=region,
        proof=prove_rows_independent(region, may_round=config.allows("bounded")),
        where=source_place(region.dispatch),
        num_host_reads=count_host_reads(region),
        rows=rows,
        row_bytes={name: _bytes_of_row(tensor) for name, tensor in rows.items()},
    )


def _capacity(region: CapacityRegion) -> FoundCapacity:
    return FoundCapacity(region=region, where=source_place(region.dispatch))


def _attention(region: AttentionRegion | AttentionRefused) -> FoundAttention:
    return FoundAttention(region=region, where=source_place(region.core))


def _payload(launch: fx.Node) -> torch.Tensor | None:
    (payload, *_) = launch.all_input_nodes
    return tensor_of(payload)


def _bytes_of_row(rows: torch.Tensor | None) -> int:
    widths = () if rows is None else rows.shape[1:]
    if rows is None or any(isinstance(width, torch.SymInt) for width in widths):
        return 0
    return math.prod(widths) * rows.element_size()
