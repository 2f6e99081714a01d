"""Carry out the plan of a graph: every region that is to have another form is emitted in it.

Contract
    Requires  REGIONS_FOUND, PLANNED.
    Provides  REWRITTEN.
    Keeps     every value outside the regions and every side effect. Values change no bit but where
              the plan says so: see `passes/kinds`.

All new forms are emitted first: until then each reads what the model's own form read, a count that
two regions share, or another region's result. Then readers are told to read the new results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from moe_compile.graph.edit import erase_dead, erase_unused, move_before, replace_uses
from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass
from passes.kinds import KINDS
from passes.replay.host_reads import forget_bindings


@dataclass(frozen=True)
class RewriteRegions(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "rewrite_regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_FOUND, Fact.PLANNED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.REWRITTEN})
    by_region: ClassVar[bool] = True

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Emit every region anew, redirect its readers, erase nodes that nothing needs."""
        dead = state.facts_of(graph).dependence.in_order(state.dead)  # read before the first edit
        emitted = [
            kind.emit(one, state)
            for kind in KINDS
            for one in state.planned[kind.name]
            if one.is_rewritten
        ]
        for new in emitted:
            replace_uses(new.instead)
            for nodes, place in new.moved:
                move_before(nodes, place)
        erase_dead(dead)
        for new in emitted:
            erase_unused(new.body)
        forget_bindings(graph)
        state.gathered_groups.update(one.plan.group for one in state.experts if one.plan.gathers)
        return PassReport(
            pass_name=self.name,
            applied=tuple(one.found.name for one in state.regions if one.is_rewritten),
            measures={"num_bulk_host_reads": sum(new.num_host_reads for new in emitted)},
        )
