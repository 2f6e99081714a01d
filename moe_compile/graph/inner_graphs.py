"""Higher-order operators: the graphs that they run, and operators whose code is in no graph.

Contract
    An operator of the second kind may write its inputs, draw random numbers and have other effects:
    such calls stay, where they are.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.fx as fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

FLEX_ATTENTION: Final = frozenset({"flex_attention", "flex_attention_backward"})
"""Attention of torch.nn.attention.flex_attention, whose graphs one kernel runs for each pair of
query and key."""
KNOWN: Final = frozenset(
    {
        "triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional",
        "auto_functionalized", "auto_functionalized_v2", "control_deps", "out_dtype",
        *FLEX_ATTENTION,
    }
)  # fmt: skip
"""Operators of torch without such a graph that only compute, or write what they declare."""
CHECKPOINT: Final = "tag_activation_checkpoint"
AUTOGRAD_FUNCTION: Final = "autograd_function_apply"
CHECKPOINT_POLICY: Final = "_checkpoint_context_fn"
KERNEL, CONSTANTS = "kernel_idx", "constant_args_idx"
"""Arguments that number a Triton kernel, and its arguments beside tensors, in a table of torch."""
SEEDED: Final = frozenset(
    {"run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"}
)
"""Operators that run one of torch's, and save or set the state of a generator before it."""


def is_higher_order(node: fx.Node) -> bool:
    """Whether the node calls a higher-order operator."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _operator_name(node: fx.Node) -> str:
    target: Any = node.target
    return str(target.name())


def is_flex_attention(node: fx.Node) -> bool:
    """Whether the node computes FlexAttention, or its gradients."""
    target: Any = node.target
    return is_higher_order(node) and target.name() in FLEX_ATTENTION


def is_autograd_function(node: fx.Node) -> bool:
    """Whether the node calls an `autograd.Function` of the program: its forward and backward."""
    return is_higher_order(node) and _operator_name(node) == AUTOGRAD_FUNCTION


def launched_kernel(node: fx.Node) -> tuple[Any, dict[str, Any]] | None:
    """Return the Triton kernel that a node launches, with its constants; None for another node."""
    kernel, constants = node.kwargs.get(KERNEL), node.kwargs.get(CONSTANTS)
    if not (is_higher_order(node) and isinstance(kernel, int) and isinstance(constants, int)):
        return None
    return kernel_side_table.get_kernel(kernel), kernel_side_table.get_constant_args(constants)


def bodies(node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs that a higher-order operator runs, [] for any other node."""
    if not is_higher_order(node):
        return []
    owner = node.graph.owning_module
    named = [
        getattr(owner, str(i.target), None) for i in node.all_input_nodes if i.op == "get_attr"
    ]
    return [body for body in named if isinstance(body, fx.GraphModule)]


def body_named(node: fx.Node) -> fx.GraphModule | None:
    """Return the graph that a `get_attr` node names, None for any other node."""
    if node.op != "get_attr":
        return None
    body = getattr(node.graph.owning_module, str(node.target), None)
    return body if isinstance(body, fx.GraphModule) else None


def inside(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of the graphs that a higher-order operator runs, [] for any other node."""
    return [inner for body in bodies(node) for inner in body.graph.nodes]


def names_of_recomputed(graph: fx.Graph) -> frozenset[str]:
    """Return the names of the bodies that activation checkpoints compute again whole.

    Bodies whose checkpoint has a policy of its own, which torch keeps on them, are left out.
    """
    names = _names_of_bodies(graph, CHECKPOINT)
    owner = graph.owning_module
    modules = {name: getattr(owner, name, None) for name in names}
    return frozenset(
        name
        for name, body in modules.items()
        if isinstance(body, fx.GraphModule) and CHECKPOINT_POLICY not in body.meta
    )


def names_of_functions(graph: fx.Graph) -> frozenset[str]:
    """Return the names of the bodies, forward and backward, of autograd functions."""
    return frozenset(_names_of_bodies(graph, AUTOGRAD_FUNCTION))


def _names_of_bodies(graph: fx.Graph, operator: str) -> list[str]:
    called = [n for n in graph.nodes if is_higher_order(n) and _operator_name(n) == operator]
    return [str(i.target) for n in called for i in n.all_input_nodes if i.op == "get_attr"]


def is_opaque(node: fx.Node) -> bool:
    """Whether the node runs code that is in no graph, such as a function that is not traced."""
    if not is_higher_order(node):
        return False
    target: Any = node.target
    return target.name() not in KNOWN | SEEDED and not bodies(node)


def seeded_call(node: fx.Node) -> tuple[torch._ops.OpOverload, list[Any], dict[str, Any]] | None:
    """Return the operator that `node` runs with a generator's state, and its arguments.

    None for any other node.
    """
    target: Any = node.target
    if not is_higher_order(node) or target.name() not in SEEDED:
        return None
    called = next(i for i, a in enumerate(node.args) if isinstance(a, torch._ops.OpOverload))
    operator: Any = node.args[called]
    given = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
    return operator, list(node.args[called + 1 :]), given


def registers_hook(node: fx.Node) -> bool:
    """Whether the node has a graph run on a gradient, even if nobody reads its result."""
    target: Any = node.target
    return is_higher_order(node) and target.name() == "register_hook"
