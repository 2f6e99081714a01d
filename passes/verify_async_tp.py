"""Count what Inductor's async TP fused, in a graph that was handed to it.

Contract
    Requires  FUNCTIONAL.
    Keeps     the graph.
    The count is a measure of the graph, `num_async_tp_products`, in every graph handed over.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar, Final

import torch.fx as fx

from moe_compile.graph.async_tp import count_fused
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass

LOG: Final = logging.getLogger("moe_compile.passes")


@dataclass(frozen=True)
class VerifyAsyncTP(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "verify_async_tp"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    commutes_with: ClassVar[frozenset[str]] = frozenset({"split_addends", "schedule_exchanges"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Report the number of fused products; warn of none."""
        if not state.async_tp:
            return self._without(Reason.NOT_ASKED)
        fused = count_fused(graph)
        if not fused:
            LOG.warning("megamoe: %s: %s", state.site, Reason.NO_MATCH.value)
            return self._without(Reason.NO_MATCH, {"num_async_tp_products": 0.0})
        return PassReport(
            pass_name=self.name,
            applied=("graph",),
            measures={"num_async_tp_products": float(fused)},
        )

    def _without(self, reason: Reason, measures: dict[str, float] | None = None) -> PassReport:
        skipped = (Verdict(candidate="graph", reason=reason),)
        return PassReport(pass_name=self.name, skipped=skipped, measures=measures or {})
