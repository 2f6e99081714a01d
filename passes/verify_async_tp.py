"""Count what Inductor's async TP fused, in a graph that was handed to it.

Contract
    Requires  FUNCTIONAL.
    Keeps     the graph.
    The count is a measure of the graph, `num_async_tp_products`, in every graph handed over.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import ClassVar, Final

import torch.fx as fx

from moe_compile.graph.async_tp import count_fused
from moe_compile.planning.state import CompileState
from passes.contract import Fact, GraphPass, PassReport, Verdict

LOG: Final = logging.getLogger("moe_compile.passes")


class NotFused(enum.Enum):
    """Why a graph has no fused product."""

    NOT_HANDED = "not handed to Inductor's async TP"
    NO_MATCH = "Inductor's async TP found nothing it could fuse"


@dataclass(frozen=True)
class VerifyAsyncTP(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "verify_async_tp"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Report the number of fused products; warn of none."""
        if not state.async_tp:
            return self._without(NotFused.NOT_HANDED)
        fused = count_fused(graph)
        if not fused:
            LOG.warning("megamoe: %s: %s", state.family, NotFused.NO_MATCH.value)
            return self._without(NotFused.NO_MATCH, {"num_async_tp_products": 0.0})
        return PassReport(
            pass_name=self.name,
            applied=("graph",),
            measures={"num_async_tp_products": float(fused)},
        )

    def _without(self, reason: NotFused, measures: dict[str, float] | None = None) -> PassReport:
        skipped = (Verdict(candidate="graph", reason=reason),)
        return PassReport(pass_name=self.name, skipped=skipped, measures=measures or {})
