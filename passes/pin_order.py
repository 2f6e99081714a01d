"""Hold launches and waits where the schedule put them, against Inductor's own reorderings.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value and the order of nodes. The last pass on a graph: launches and waits end
              up inside a higher-order operator, where no other pass would know them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from moe_compile.graph.pinning import pin_order
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass


@dataclass(frozen=True)
class PinOrder(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "pin_order"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    after: ClassVar[frozenset[str]] = frozenset({"copy_fills", "realize_slices", "size_attention"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Add the dependences, where torch has the means and the schedule is ours."""
        reason = None if state.config.schedule else Reason.NOT_ASKED
        if reason is None and not pin_order(graph):
            reason = Reason.NO_MEANS
        if reason is None:
            return PassReport(pass_name=self.name, applied=("graph",))
        left = Verdict(candidate="graph", reason=reason, option="schedule")
        return PassReport(pass_name=self.name, skipped=(left,))
