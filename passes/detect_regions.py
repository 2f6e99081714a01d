"""Find the regions of a graph, of every kind, and prove them.

Contract
    Requires  WAITS_VISIBLE.
    Provides  REGIONS_FOUND.
    Keeps     the graph; marks the exchanges of each region as such.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.inner_graphs import is_autograd_function
from moe_compile.graph.launch_order import mark_region
from moe_compile.graph.query import source_place
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.plan.planned import Findings
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass
from passes.function_exchanges import Unknown, exchanges_of
from passes.kinds import KINDS


@dataclass(frozen=True)
class DetectRegions(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "detect_regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.WAITS_VISIBLE})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_FOUND})
    after: ClassVar[frozenset[str]] = frozenset({"apply_scores"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Fill `state.found`; a region that a proof refuses is found all the same."""
        found, facts = Findings(), state.facts_of(graph)
        for kind in KINDS:
            new = kind.find(facts, state.config, found)
            kept = (other for other in found.others if other.candidate not in new.exchanges)
            found = Findings(
                by_kind={**found.by_kind, kind.name: new.found}, others=(*kept, *new.others)
            )
        left = (*found.others, *_inside_functions(graph))
        others = tuple(_told(graph, other, state.config) for other in left)
        state.found = replace(found, others=others)
        for region in found.regions:
            state.num_marked += 1
            mark_region(region.launches, str(state.num_marked))
        candidates = (one.region for each in found.by_kind.values() for one in each)
        return PassReport(
            pass_name=self.name,
            applied=tuple(region.name for region in found.regions),
            skipped=(
                *others,
                *(none for none in candidates if isinstance(none, Verdict)),
            ),
        )


def _inside_functions(graph: fx.Graph) -> Iterator[Verdict]:
    """Yield a verdict on each exchange that is still inside an autograd function."""
    for node in filter(is_autograd_function, graph.nodes):
        found = exchanges_of(node)
        if isinstance(found, Unknown):
            yield Verdict(candidate=node.name, reason=found.reason, detail=found.because)


def _told(graph: fx.Graph, other: Verdict, config: MegaMoEConfig) -> Verdict:
    """Return `other` with its place in the source and the option that asks for it, if any."""
    options = ("chunks", "dispatch", "dispatch_wire", "combine_wire") if other.is_region else ()
    option = next(filter(config.asks_for, options or ("chunks",)), "")
    where = next((source_place(n) for n in graph.nodes if n.name == other.candidate), "")
    return replace(other, option=option, is_asked=bool(option), where=where)
