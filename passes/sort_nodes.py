"""Put a joint graph in an order in which every node stands behind its inputs.

Contract
    Requires  FUNCTIONAL.
    Keeps     every edge, and the order of nodes that are in order already: Inductor's own patterns
              on the joint graph leave the sorting for later. And every node, but for waits for
              several tensors, which derivatives bring: they become waits for each, as passes know
              them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx
from torch._inductor.pattern_matcher import stable_topological_sort

from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass
from passes.normalize_exchanges import split_waits


@dataclass(frozen=True)
class SortNodes(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "sort_nodes"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Move nodes; the report says nothing where all were in order."""
        del state
        before = list(graph.nodes)
        stable_topological_sort(graph)
        moved = before != list(graph.nodes)
        split_waits(graph)
        return PassReport(pass_name=self.name, applied=("graph",) if moved else ())
