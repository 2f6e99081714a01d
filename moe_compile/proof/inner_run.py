"""Run the graphs that higher-order operators run: of activation checkpoints, and of functions whose
backward is written by hand.

Contract
    A graph runs under its own modes, inside of those that its call runs under. What the host reads
    there, and collectives, are refused. Gradients of a function written by hand are asked for once,
    each of the form of what it is the gradient of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.graph.inner_graphs import CHECKPOINT, bodies, is_higher_order
from moe_compile.graph.modes import changes_mode, modes, running_under
from moe_compile.graph.observation import call
from moe_compile.graph.query import is_launch, operator_at
from moe_compile.journal.reasons import Reason
from moe_compile.proof.trace_steps import GradientMade, GradientOf, Produced, Step
from moe_compile.regions.row_domain import Unproven

FUNCTION: Final = "autograd_function_apply"


class NotRun(Exception):
    """A graph could not be run; carries why."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        """Keep the refusal."""
        super().__init__(detail)
        self.why = Unproven(reason, detail)


def runs_graphs(node: fx.Node) -> bool:
    """Whether the node runs graphs at hand, as they are."""
    target: Any = node.target
    return is_higher_order(node) and _number_of_graphs(target.name()) == len(bodies(node))


def _number_of_graphs(name: str) -> int:
    return {CHECKPOINT: 1, FUNCTION: 2}.get(name, -1)


def run_node(node: fx.Node, value: Callable[[Any], Any]) -> Any:
    """Call what `node` calls, on what `value` returns for the nodes it reads."""
    if node.op not in ("call_function", "call_method"):
        raise NotRun(Reason.UNKNOWN_OPERATOR, node.op)
    return call(node, *fx.node.map_arg((node.args, node.kwargs), value))


class InnerRun:
    """Runs the graphs of one operator, and of operators in them."""

    def __init__(
        self,
        value: Callable[[Any], Any],
        steps: list[Step],
        outer: fx.Node,
    ) -> None:
        """Read what is around the operator by `value`; add what is made to `steps`.

        `outer` is the node of the region that runs all of it.
        """
        self._value, self._steps, self._outer = value, steps, outer

    def higher_order(self, node: fx.Node) -> Any:
        """Return what an operator makes that runs graphs."""
        given = [a for a in node.args if not (isinstance(a, fx.Node) and a.op == "get_attr")]
        arguments = fx.node.map_arg(given, self._value)
        graphs = [body.graph for body in bodies(node)]
        target: Any = node.target
        if target.name() == CHECKPOINT:
            return self._run(graphs[0], arguments)
        if node.kwargs.get("dirty_idx"):
            raise NotRun(Reason.UNKNOWN_OPERATOR, f"{FUNCTION} that writes its arguments")
        return self._function(graphs, arguments)

    def _function(self, graphs: Sequence[fx.Graph], arguments: Sequence[Any]) -> Any:
        forward, backward = graphs
        results, saved = self._run(forward, arguments)
        made = [r for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]
        given = [torch.empty_like(result) for result in made]
        for gradient, result in zip(given, made, strict=True):
            self._steps.append(GradientOf(self._outer, gradient, result))
        returned = pytree.tree_leaves(self._run(backward, [*given, *saved]))
        if len(returned) != len(arguments):
            raise NotRun(Reason.UNKNOWN_OPERATOR, f"{FUNCTION} with gradients of other arguments")
        pairs = zip(returned, arguments, strict=True)
        for gradient, argument in pairs:
            if isinstance(gradient, torch.Tensor) and isinstance(argument, torch.Tensor):
                self._steps.append(GradientMade(self._outer, gradient, argument))
        return results

    def _run(self, graph: fx.Graph, arguments: Sequence[Any]) -> Any:
        env: dict[fx.Node, Any] = {}
        in_force, given = modes(graph), iter(arguments)
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], env.__getitem__)
            elif node.op != "get_attr" and not changes_mode(node):
                with running_under(in_force[node]):
                    env[node] = self._inner(node, env)
                if isinstance(env[node], torch.Tensor):
                    self._steps.append(Produced(node, env[node]))
        raise NotRun(Reason.UNKNOWN_OPERATOR, "a graph without a result")

    def _inner(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        if is_launch(node):
            raise NotRun(Reason.COMMUNICATES, operator_at(node))
        if node.op == "call_method" and node.target in ("item", "tolist"):
            raise NotRun(
                Reason.UNKNOWN_OPERATOR, f"{operator_at(node)}: the host reads inside a graph"
            )
        if not is_higher_order(node):
            return run_node(node, env.__getitem__)
        if not runs_graphs(node):
            raise NotRun(Reason.UNKNOWN_OPERATOR, str(node.target))
        return InnerRun(env.__getitem__, self._steps, self._outer).higher_order(node)
