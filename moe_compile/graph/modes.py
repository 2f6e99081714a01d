"""The modes of the interpreter that the nodes of a Dynamo graph run under: gradients, autocast, ...

Contract
    A graph says where a mode is switched; the modes in force before its first node are in force
    while it is compiled too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, TypeAlias

import torch
import torch.fx as fx
from torch.autograd.graph import saved_tensors_hooks

from moe_compile.graph.query import called_name, has_gradient, is_assertion, value_of

Mode: TypeAlias = tuple[object, tuple[fx.Node, ...]]
"""Whether gradients are on, None where unknown; every other switch still thrown."""


MODE_SWITCHES: Final = (
    "_set_", "set_grad_enabled", "set_inplace_requires_grad_allowed", "_enter_", "_exit_",
    "_exchange_", "_maybe_exchange_", "_saved_tensors_hooks_", "push_dynamic_layer_stack",
    "pop_dynamic_layer_stack",
)  # fmt: skip
"""Prefixes of the functions by which Dynamo enters and leaves a program's `with` blocks."""


def changes_mode(node: fx.Node) -> bool:
    """Whether the node switches a mode of the interpreter: grad mode, autocast, `vmap`, ..."""
    if node.op != "call_function":
        return False
    name = called_name(node)
    by_name = name.startswith(MODE_SWITCHES) or name.endswith("_nesting")
    return by_name or chooses_attention(node) or _sets_state(node)


def _sets_state(node: fx.Node) -> bool:
    """Whether the node calls a function of torch that sets a state: it has no input and no result.

    Examples are `torch.set_autocast_enabled` and `torch.set_default_dtype`.
    """
    of_torch = str(getattr(node.target, "__module__", None)).partition(".")[0] == "torch"
    is_function = of_torch and not isinstance(node.target, torch._ops.OperatorBase)
    makes_nothing = not (node.all_input_nodes or node.users) and value_of(node) is None
    return is_function and makes_nothing and not is_assertion(node)


def chooses_attention(node: fx.Node) -> bool:
    """Whether the node enters or leaves `torch.nn.attention.sdpa_kernel`."""
    return node.op == "call_function" and called_name(node) == "_sdpa_kernel"


def changes_grad_mode(node: fx.Node) -> bool:
    """Whether the node switches gradients on or off."""
    return changes_mode(node) and "grad_enabled" in called_name(node)


def changes_autocast(node: fx.Node) -> bool:
    """Whether the node enters or leaves autocast."""
    return node.op == "call_function" and called_name(node) in ("_enter_autocast", "_exit_autocast")


def modes(graph: fx.Graph) -> dict[fx.Node, Mode]:
    """Return the modes that every node runs under."""
    return dict(_modes(graph))


@contextmanager
def running_under(mode: Mode) -> Iterator[None]:
    """Run functions of torch with the gradients and autocast of `mode`."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(mode[0] is not False))
        for switch in filter(changes_autocast, mode[1]):
            stack.enter_context(torch.autocast(*switch.args, **switch.kwargs))
        yield


def entered_since(here: Mode, there: Mode) -> tuple[fx.Node, ...] | None:
    """Return the switches thrown in `here` after those in `there`, which are thrown here too.

    None where some are not, or gradients are on in one alone.
    """
    same, switches = here[0] == there[0], here[1]
    if not same or switches[: len(there[1])] != there[1]:
        return None
    return switches[len(there[1]) :]


def _modes(graph: fx.Graph) -> Iterator[tuple[fx.Node, Mode]]:
    """Yield every node with its modes."""
    grad_mode: object = _first_grad_mode(graph)
    thrown: tuple[fx.Node, ...] = ()
    for node in graph.nodes:
        yield node, (grad_mode, thrown)
        if changes_grad_mode(node):
            grad_mode = node.args[0] if node.args else None
        elif changes_mode(node):
            entered = next((i for i in node.all_input_nodes if i in thrown), None)
            if entered is not None and "exit" in getattr(node.target, "__name__", ""):
                thrown = tuple(n for n in thrown if n is not entered)
            else:
                thrown = (*thrown, node)


def _first_grad_mode(graph: fx.Graph) -> bool:
    """Return the grad mode in force now, or True if a gradient flows before the first switch."""
    for node in graph.nodes:
        if changes_grad_mode(node):
            break
        if node.op not in ("placeholder", "get_attr") and has_gradient(node):
            return True
    return torch.is_grad_enabled()


def modes_around() -> Iterator[str]:
    """Yield the modes in force around the compilation, which no node of the graph sets."""
    yield f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}"
    yield str(torch.get_default_dtype())
    for device in ("cpu", "cuda"):
        yield f"{torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}"


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Run the block without the hooks of `torch.autograd.graph.saved_tensors_hooks` in force.

    Activation checkpointing counts by them the tensors that a program saves for its backward, and
    ends a recomputation from inside them.
    """
    with ExitStack() as stack:
        with suppress(RuntimeError):  # `disable_saved_tensors_hooks`: there are none
            stack.enter_context(saved_tensors_hooks(_same, _same))
        yield


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
