"""Follow factors through any node that calls torch: by the aten operators that it runs.

Contract
    The node runs once, on the fake tensors that the tracer stored of its inputs. The rules of
    operators are in one table, `dims/operators.py`; an operator that is not there is decomposed as
    torch does, or raises Lost. The caller sets the modes of the node's place, as autocast.
    A node that draws random numbers, or calls a function that is not torch's, raises Lost.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.dims.arguments import operator_name
from moe_compile.dims.factors import Lost
from moe_compile.dims.flow import Call, Flow, Followed
from moe_compile.dims.operators import UNIFORM, follow_operator, is_known
from moe_compile.dims.operators import operator_name as aten_name
from moe_compile.dims.record import UNTRACEABLE, Operator, Recorder
from moe_compile.graph.inner_graphs import is_higher_order
from moe_compile.graph.observation import call, draws_by_schema, fake_mode_of, running_on
from moe_compile.graph.query import is_launch, operator_at, value_of

NOT_FOLLOWED: Final = "is an operator through which megamoe traces no dimensions"
AS_ONE: Final = {
    "scaled_dot_product_attention": torch.ops.aten.scaled_dot_product_attention.default
}
"""Functions that torch decomposes by device, and that are followed as one operator."""


def run_node(
    flow: Flow, known: Callable[[fx.Node], Followed], instead: Mapping[str, Any] | None = None
) -> Any:
    """Return the result of `flow.node`, with its tensors in `flow`; `known` gives its inputs.

    With `instead` the node is given these arguments, all by name.
    """
    node = flow.node
    fake = fake_mode_of([value_of(source) for source in node.all_input_nodes])
    if fake is None or not _may_run(node):
        raise flow.lost(NOT_FOLLOWED)
    given: dict[fx.Node, Any] = {}

    def value(read: fx.Node) -> Any:
        if read not in given:
            found = value_of(read)
            if isinstance(found, torch.Tensor):
                followed = known(read)
                found = followed.tensor
                flow.give(followed)
            given[read] = found
        return given[read]

    recorder = recorder_of(flow)
    args, kwargs = (node.args, node.kwargs) if instead is None else ((), dict(instead))
    try:
        with running_on(fake):
            args, kwargs = fx.node.map_arg((args, kwargs), value)
            if (func := AS_ONE.get(operator_name(node))) is not None:
                made = value_of(node).detach()
                follow_one(flow, Operator(node, func, args, kwargs, made))
                return made
            with recorder:
                made = recorder.run(node, lambda: call(node, args, kwargs))
    except UNTRACEABLE as error:
        raise Lost(f"{operator_at(node)} does not run: {error}") from error
    return args[0] if made is None else made  # `x[...] = y`


def _may_run(node: fx.Node) -> bool:
    if is_launch(node) or is_higher_order(node):
        return False
    module = str(getattr(node.target, "__module__", "torch")).partition(".")[0]
    return node.op == "call_method" or module in ("torch", operator.add.__module__, "builtins")


def recorder_of(flow: Flow) -> Recorder:
    """Return the recorder that follows factors through the operators that run under it."""
    return Recorder(lambda one: follow_one(flow, one), is_known)


def follow_one(flow: Flow, one: Operator) -> None:
    """Follow factors through an operator that makes tensors of tensors."""
    is_one = one.func in AS_ONE.values()  # whether it draws is asked elsewhere
    if not is_one and draws_by_schema(one.func, one.args, one.kwargs):
        raise flow.lost("draws random numbers")
    if not one.inputs:
        if aten_name(one.func) not in UNIFORM:  # its values differ by place, as of `arange`
            flow.close(dim for tensor in one.outputs for dim in flow.dims(tensor))
        return
    if not one.outputs:
        return
    inherited = [pair for tensor in one.inputs for pair in flow.of(tensor).picked]
    picked = [list(inherited) for _ in one.outputs]
    follow_operator(Call(one.node, one.func, one.args, one.kwargs, one.out, flow, picked))


def results(made: Any) -> list[torch.Tensor]:
    """Return the tensors among the results of a node."""
    return [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
