"""Change a graph: build nodes in the middle of it, replace, move and erase others.

Contract
    Every node an `Emitter` makes stands before its anchor, in the order of the calls, and carries
    the anchor's stack trace, so that errors name the user's line.
    A node that does more than make a value is erased or moved here only if `legality` has said
    that nothing needs it. No pass edits a graph by other means (tests/architecture).
    `store_values` gives new nodes of a Dynamo graph the values that the tracer would have stored.
    Each node is run on the values stored of its inputs; nothing is computed. It requires a gradient
    where the node that it copies does. Integers that the host reads become new symbols.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from moe_compile.errors import ContractViolation
from moe_compile.graph.effects import is_host_arithmetic, is_pure
from moe_compile.graph.inner_graphs import body_named
from moe_compile.graph.modes import changes_mode, modes, running_under
from moe_compile.graph.observation import call, running_on
from moe_compile.graph.precedence import find_predecessors
from moe_compile.graph.query import (
    has_gradient,
    is_all_to_all,
    is_launch,
    is_wait,
    tensor_of,
    value_of,
)

CARRIED: Final = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")
"""Meta keys that say where a node comes from; all others are facts about one value."""
GIVEN: Final = "eager_input_vals"
"""Meta key under which Inductor finds the arguments of a call, to give them the same strides."""


class Emitter:
    """Appends nodes before `anchor`."""

    def __init__(self, anchor: fx.Node) -> None:
        """Emit before `anchor`, which stays."""
        self.anchor = anchor
        self.graph = anchor.graph

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of a function or operator."""
        with self.graph.inserting_before(self.anchor):
            return self._carry(self.graph.call_function(target, args, kwargs), self.anchor)

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of the tensor method `name`; the tensor is the first argument."""
        with self.graph.inserting_before(self.anchor):
            return self._carry(self.graph.call_method(name, args, kwargs), self.anchor)

    def copy(self, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        """Emit `node` again, reading `env[input]` where env has the input."""
        with self.graph.inserting_before(self.anchor):
            copied = self.graph.node_copy(node, lambda n: env.get(n, n))
        copied.meta = {}
        return self._carry(copied, node)

    def instead(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of a function or operator in the place of `node`."""
        with self.graph.inserting_before(self.anchor):
            return self._carry(self.graph.call_function(target, args, kwargs), node)

    @staticmethod
    def _carry(node: fx.Node, source: fx.Node) -> fx.Node:
        node.meta.update({k: source.meta[k] for k in CARRIED if k in source.meta})
        return node


class ValuedEmitter(Emitter):
    """Appends nodes to a graph of AOTAutograd, each with the fake value that later passes read."""

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of a function or operator."""
        node = super().call(target, *args, **kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
        return node


def note_receivers(graph: fx.Graph) -> None:
    """Give an example value to every node that a method is called on: None where none is known.

    AOTAutograd's cache takes a graph only where all of these have one. Dynamo gives none to an
    element of a vector that the host reads: a tensor without dimensions, as it is written here.
    """
    for node in graph.find_nodes(op="call_method"):
        for receiver in (a for a in node.args[:1] if isinstance(a, fx.Node)):
            receiver.meta.setdefault("example_value", _element_of_vector(receiver))


def _element_of_vector(node: fx.Node) -> torch.Tensor | None:
    """Return the fake value of `vector[integer]`; None for any other node."""
    if node.target is not operator.getitem or type(node.args[1]) is not int:
        return None
    vector = tensor_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    return vector.new_empty(()) if vector is not None and vector.dim() == 1 else None


def forget_slice_sizes(graph: fx.Graph) -> None:
    """Remove every slice's claim to bind a symbol for its size: a trace finds sizes anew.

    Dynamo knows only that the size of `rows[:n]` is some number, as long as n could be negative.
    AOTAutograd refuses the claim where more is known of n: from nodes that a pass emitted, or from
    an earlier trace of the same program.
    """
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        if isinstance(node.args[1], slice):
            node.meta.pop("unbacked_bindings", None)


def recompute_between(source: fx.Node, results: Iterable[fx.Node]) -> None:
    """Have the backward pass compute `results` again from `source`, instead of keeping them.

    The key is read by AOTAutograd's partitioner, as it is for activation checkpointing.
    """
    todo = list(results)
    while todo:
        node = todo.pop()
        if node is not source and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            todo.extend(node.all_input_nodes)


def recompute_all(graph: fx.Graph) -> None:
    """Have the backward pass of a Dynamo graph recompute all but results of all-to-alls."""
    for node in graph.nodes:
        if node.op.startswith("call"):
            launch = node.all_input_nodes[0] if is_wait(node) else node
            is_saved = is_all_to_all(launch)
            policy = CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.MUST_RECOMPUTE
            node.meta["recompute"] = policy


def erase_unused(nodes: Iterable[fx.Node]) -> int:
    """Erase those of `nodes` (in graph order) that nobody reads, last first; return how many.

    Nodes that write, draw random numbers, switch a mode or assert stay.
    """
    erased = 0
    for node in reversed(list(nodes)):
        if not node.users and (is_pure(node) or is_launch(node) or is_wait(node)):
            node.graph.erase_node(node)
            erased += 1
    return erased


def erase_dead(nodes: Sequence[fx.Node]) -> None:
    """Erase the nodes that `Legality.unneeded` returned: in graph order, writes included.

    Raises ContractViolation when one of them still has a reader.
    """
    for node in reversed(nodes):
        if node.users:
            readers = ", ".join(user.name for user in node.users)
            raise ContractViolation(f"{node.name} is to be erased, but {readers} still read it")
        node.graph.erase_node(node)


def replace_uses(values: Mapping[fx.Node, fx.Node]) -> None:
    """Have every reader of a key, except the key's value, read that value instead."""
    for node, value in values.items():
        node.replace_all_uses_with(value, delete_user_cb=lambda user, own=value: user is not own)


def append_output(graph: fx.Graph, node: fx.Node) -> None:
    """Have a graph that returns a tuple return `node` as well, last."""
    output = graph.output_node()
    (values,) = output.args
    assert isinstance(values, list | tuple)
    output.args = (type(values)((*values, node)),)


def read_instead(reader: fx.Node, node: fx.Node, value: fx.Node) -> None:
    """Have `reader` alone read `value` where it read `node`."""
    reader.replace_input_with(node, value)


def change_value(node: fx.Node, value: torch.Tensor) -> None:
    """Note that an input of a graph of AOTAutograd is another tensor, for later passes."""
    node.meta = {**node.meta, "val": value}  # the partitioner shares it among graphs
    node.meta.pop("tensor_meta", None)


def call_otherwise(node: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Have `node` call `target`, a function that makes the same kind of value."""
    node.op, node.target, node.args, node.kwargs = "call_function", target, args, kwargs
    node.meta.pop(GIVEN, None)


def substitute(node: fx.Node, value: fx.Node) -> None:
    """Have every reader of `node` read `value`, and erase `node`.

    Raises ContractViolation when `node` does more than make its value.
    """
    replace_uses({node: value})
    if not erase_unused([node]):
        raise ContractViolation(f"{node.name} does more than make a value: it must stay")


def move_before(nodes: Iterable[fx.Node], anchor: fx.Node) -> None:
    """Move nodes that `Legality.obstacle` allows before `anchor`, in the order given.

    Raises ContractViolation for a node that does more than make a value, or assert one.
    """
    for node in nodes:
        if not (is_host_arithmetic(node) or is_pure(node)):
            raise ContractViolation(f"{node.name} does more than make a value: it must stay")
        anchor.prepend(node)


def reorder(order: Sequence[fx.Node]) -> None:
    """Put the nodes of a graph of AOTAutograd in `order`, which holds all of them.

    Raises ContractViolation when a node would be placed before one that must precede it.
    """
    place = {node: i for i, node in enumerate(order)}
    for node, before in find_predecessors(order[0].graph).items():
        late = next((p for p in before if p in place and place[p] > place[node]), None)
        if late is not None:
            raise ContractViolation(
                f"{node.name} would be placed before {late.name}, whose result it reads"
            )
    for node, following in itertools.pairwise(order):
        node.append(following)


def store_values(
    nodes: Sequence[fx.Node], fake: FakeTensorMode, original: Mapping[fx.Node, fx.Node]
) -> None:
    """Store the value of each of `nodes`, in graph order.

    `original` maps copies to their originals; other nodes require a gradient where an input does.
    """
    modes_of = modes(nodes[0].graph) if nodes else {}
    for node in nodes:
        if changes_mode(node):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), _given)
        with running_on(fake), running_under(modes_of[node]), torch.no_grad():
            value = call(node, args, kwargs)
            copied = original.get(node)
            flows = any(map(has_gradient, [copied] if copied else node.all_input_nodes))
            node.meta["example_value"] = _with_gradient(value) if flows else value


def _given(node: fx.Node) -> Any:
    if (body := body_named(node)) is not None:
        return body
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value_of(node))


def _with_gradient(value: Any) -> Any:
    def flows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.requires_grad_() if tensor.dtype.is_floating_point else tensor

    return pytree.tree_map_only(torch.Tensor, flows, value)
