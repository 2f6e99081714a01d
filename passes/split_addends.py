"""Take sums out of matrix products that would have to wait for an exchange.

Contract
    Requires  FUNCTIONAL.
    Keeps     eager's values: only a sum that Inductor has put into a product is taken out again.
              It then rounds by itself, as in eager; inside the product it did not.

    addmm(received, a, b)  ->  mm(a, b) + received

Inductor makes one operator of a product and a sum, as of shared experts and the combine of the
routed ones. Fused, the product could not run under the exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
import torch.fx as fx

from moe_compile.graph.edit import ValuedEmitter, substitute
from moe_compile.graph.query import is_wait
from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass

ADDMM: Final = torch.ops.aten.addmm.default
ADD: Final = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class SplitAddends(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "split_addends"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Split every product whose addend waits for more than its factors do."""
        if not state.config.schedule:
            return PassReport(pass_name=self.name)
        chosen = _late_sums(graph)
        for node in chosen:
            addend, *factors = node.args
            emit = ValuedEmitter(node)
            product = emit.call(torch.ops.aten.mm.default, *factors)
            substitute(node, emit.call(ADD, product, addend))
        return PassReport(pass_name=self.name, applied=tuple(node.name for node in chosen))


def _late_sums(graph: fx.Graph) -> list[fx.Node]:
    """Return the sums inside of products whose addend needs an exchange that the factors do not."""
    needed: dict[fx.Node, frozenset[fx.Node]] = {}
    chosen = []
    for node in graph.nodes:
        needs = frozenset[fx.Node]().union(*(needed[a] for a in node.all_input_nodes))
        needed[node] = needs | {node} if is_wait(node) else needs
        if _is_fused_sum(node):
            addend, *factors = node.args
            if needed[addend] - needed[factors[0]] - needed[factors[1]]:
                chosen.append(node)
    return chosen


def _is_fused_sum(node: fx.Node) -> bool:
    """Whether the node is a product and a sum that are separate in the program, neither scaled."""
    is_plain = node.target is ADDMM and len(node.args) == 3 and not node.kwargs
    of_sum = str(node.meta.get("original_aten")) == str(ADD)  # it may be a copy
    return is_plain and (of_sum or "from_node" not in node.meta)  # torch 2.11 notes no origin
