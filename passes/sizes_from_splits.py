"""Take the number of rows an exchange receives from its split sizes, not from its result.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value: an all-to-all receives as many rows as its output splits add up to.

A backward graph that recomputes an exchange asked its result for its size, to cut gradients by it:
so the first exchange of gradients waited for the recomputed one, though the host knew the number.
On a rank without tokens the tracer writes 0 there, no size is asked for, and exchanges would be in
another order than on the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from moe_compile.graph.edit import substitute
from moe_compile.graph.query import SIZE, is_all_to_all, is_wait, output_splits
from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass


@dataclass(frozen=True)
class SizesFromSplits(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "sizes_from_splits"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    after: ClassVar[frozenset[str]] = frozenset({"sort_nodes", "merge_host_reads"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Replace each size by the sum of the splits."""
        del state
        asked = graph.find_nodes(op="call_function", target=SIZE)
        found = [(node, _exchange(node)) for node in asked if node.args[1] == 0]
        applied = []
        for node, launch in found:
            if launch is None:
                continue
            with graph.inserting_before(node):
                total = graph.call_function(torch.sym_sum, (list(output_splits(launch)),))
            total.meta.update(node.meta)
            substitute(node, total)
            applied.append(node.name)
        return PassReport(pass_name=self.name, applied=tuple(applied))


def _exchange(size: fx.Node) -> fx.Node | None:
    """Return the all-to-all of uneven parts whose result's size `size` is."""
    asked = size.args[0]
    while isinstance(asked, fx.Node) and is_wait(asked):
        asked = asked.args[0]
    splits = isinstance(asked, fx.Node) and is_all_to_all(asked) and output_splits(asked)
    return asked if splits else None
