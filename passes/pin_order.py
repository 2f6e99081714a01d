"""Hold launches and waits where the schedule put them, against Inductor's own reorderings.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value and the order of nodes. The last pass on a graph: launches and waits end
              up inside a higher-order operator, where no other pass would know them.

`pin_order` makes Inductor run the order the FX graph is in. It leaves the graph's values and the
order of its work as they are; where torch lacks the means it does nothing and says so.
"""

from __future__ import annotations

import importlib
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx as fx
from torch.utils._ordered_set import OrderedSet

from moe_compile.graph.inner_graphs import is_flex_attention
from moe_compile.graph.query import ends_transfer, overload_name, starts_transfer
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass


@dataclass(frozen=True)
class PinOrder(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "pin_order"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    after: ClassVar[frozenset[str]] = frozenset(
        {"copy_fills", "realize_slices", "size_attention", "bound_captures"}
    )

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Add the dependences, where torch has the means and the schedule is ours."""
        reason = None if state.config.schedule else Reason.NOT_ASKED
        if reason is None and not pin_order(graph):
            reason = Reason.NO_MEANS
        if reason is None:
            return PassReport(pass_name=self.name, applied=("graph",))
        left = Verdict(candidate="graph", reason=reason, option="schedule")
        return PassReport(pass_name=self.name, skipped=(left,))


def pin_order(graph: fx.Graph) -> bool:
    """Hold launches and waits in their order, and matrix products where they stand between these.

    Attention is held before the exchanges behind it: it is long enough to hide the work they wait
    for, and the host's time to launch them.
    This is stronger than the settings: fusion cannot pull a wait before compute it stands after,
    nor compute under an exchange before its launch, with a kernel that the launch needs. It has to
    be the last edit of a graph, as all held nodes end up inside a higher-order operator. Returns
    whether torch has the means.
    """
    try:
        control = importlib.import_module("torch._inductor.fx_passes.control_dependencies")
        lowering = importlib.import_module("torch._inductor.lowering")
    except ImportError:
        return False
    # inputs that several of these read are computed once, as where none is inside of an operator
    lowering.needs_realized_inputs.add(control.control_deps)
    _take_elements_at_once(graph)
    control.preserve_node_ordering(graph, _held(graph))
    return True


def _take_elements_at_once(graph: fx.Graph) -> None:
    """Put the elements of attention's results next to it: they are no work, and can be held."""
    for attention in filter(_is_attention, list(graph.nodes)):
        for reader in reversed(list(attention.users)):
            if reader.target is operator.getitem:
                attention.append(reader)


def _held(graph: fx.Graph) -> dict[fx.Node, Any]:
    """Return held node -> the nodes that it must stand behind."""
    after: dict[fx.Node, Any] = {}
    exchange: fx.Node | None = None
    work: list[fx.Node] = []
    follows: set[fx.Node] = set()
    """Nodes that depend on the last launch or wait."""
    for node in graph.nodes:
        if starts_transfer(node) or ends_transfer(node):
            known = {None, *node.all_input_nodes}
            behind = [earlier for earlier in (exchange, *work) if earlier not in known]
            if behind:
                after[node] = OrderedSet(behind)
            exchange, work, follows = node, [], {node}
            continue
        if not follows.isdisjoint(node.all_input_nodes):
            follows.add(node)
        if _is_matrix_product(node):
            work.append(node)
            if exchange is not None and node not in follows:
                after[node] = OrderedSet([exchange])
                follows.add(node)
        elif _is_attention(node) or (node.target is operator.getitem and node.args[0] in work):
            work.append(node)  # an element too: torch 2.11 holds nothing behind a tuple
    return after


def _is_attention(node: fx.Node) -> bool:
    return is_flex_attention(node) or "::_scaled_dot_product_" in overload_name(node)


def _is_matrix_product(node: fx.Node) -> bool:
    op = overload_name(node).rpartition("::")[2]
    return isinstance(node.target, torch._ops.OpOverload) and op.endswith("mm")
