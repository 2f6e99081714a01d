"""An `autograd.Function` of the program that is a collective of its input, and nothing else.

Contract
    Each result of the forward body is the result of one collective on one input. The backward body
    gives each such input the collective's own derivative, and no other input a gradient. Then the
    plain collective, awaited, has the same values and gradients.
    A body is followed as long as it moves no value but by collectives: inputs are handed on,
    collectives are launched on them and awaited, their results are copied into new memory, and the
    host computes sizes. The first node that does anything else ends it. A node in `given` or
    `brought` has the values, the type and the sizes of the input or result it maps to, in every
    run.

Fairscale, DeepSpeed and Megatron-Core exchange rows so: `all_to_all_single` into empty memory
forward, the same with the split lists swapped backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from moe_compile.graph.edit import Emitter, erase_dead, substitute
from moe_compile.graph.effects import is_host_arithmetic
from moe_compile.graph.inner_graphs import bodies
from moe_compile.graph.modes import changes_mode
from moe_compile.graph.observation import fake_mode_of, running_on
from moe_compile.graph.query import (
    C10D,
    called_name,
    has_dynamic_splits,
    is_all_to_all,
    is_assertion,
    is_launch,
    is_wait,
    overload_name,
    tensor_of,
    value_of,
)
from moe_compile.journal.reasons import Reason

HAND_ON: Final = frozenset({"view_as", "alias", "detach"})
"""Functions and methods that return the values of their first argument as they are."""
HAND_ON_IF_ALIKE: Final = frozenset({"contiguous", "clone", "view", "reshape", "to", "flatten"})
"""Those of them that also keep type and sizes."""
MAKE_MEMORY: Final = frozenset(
    {"empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros"}
)
"""Functions and methods that make a tensor which no other node has."""
NUMBERS: Final = (int, torch.SymInt, torch.SymBool)
READ_SIZES: Final = frozenset({"size", "numel", "dim"})


@dataclass(slots=True)
class BodyValues:
    """The nodes of a body, followed; see the module docstring."""

    graph: fx.Graph
    given: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Node -> the input of the body whose values it has."""
    brought: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Node -> the launch whose awaited result it has."""
    sizes: set[fx.Node] = field(default_factory=set)
    """Numbers that the host computes from sizes."""
    obstacle: fx.Node | None = None
    """The first node that is not followed."""
    _memory: set[fx.Node] = field(default_factory=set)
    """New memory that nothing has filled yet."""

    @classmethod
    def of(cls, graph: fx.Graph) -> BodyValues:
        """Follow the body `graph`."""
        values = cls(graph)
        for node in graph.nodes:
            if node.op != "output" and not values._follow(node):
                values.obstacle = node
                break
        return values

    @property
    def inputs(self) -> list[fx.Node]:
        """The body's inputs, in order."""
        return self.graph.find_nodes(op="placeholder")

    @property
    def launches(self) -> list[fx.Node]:
        """The collectives that the body launches."""
        return [node for node in self.graph.nodes if is_launch(node)]

    def _follow(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            self.given[node] = node
        elif self._is_size(node):
            self.sizes.add(node)
        elif is_launch(node):
            return bool(node.args) and node.args[0] in self.given
        elif is_wait(node):
            return self._wait(node)
        elif called_name(node) in MAKE_MEMORY and tensor_of(node) is not None:
            self._memory.add(node)
        elif called_name(node) == "copy_":
            return self._fill(node)
        else:
            return changes_mode(node) or self._hand_on(node)
        return True

    def from_inputs(self, numbers: Any) -> bool:
        """Whether numbers are computed from the body's inputs alone."""
        nodes = [n for n in pytree.tree_leaves(numbers) if isinstance(n, fx.Node)]
        of_inputs = (n in self.given or self.from_inputs(n.all_input_nodes) for n in nodes)
        return all(n in self.given or n in self.sizes for n in nodes) and all(of_inputs)

    def _is_size(self, node: fx.Node) -> bool:
        """Whether the host computes the node, a number, from sizes."""
        reads = called_name(node) in READ_SIZES or overload_name(node).startswith("aten::sym_")
        is_item = node.target is operator.getitem and node.args[0] in self.sizes
        computes = reads or is_item or is_host_arithmetic(node)
        return computes and not is_assertion(node) and _is_number(value_of(node))

    def _wait(self, node: fx.Node) -> bool:
        awaited = node.args[0]
        launch = self.brought.get(awaited, awaited)
        if not isinstance(launch, fx.Node) or not is_launch(launch):
            return False
        self.brought[node] = launch
        return True

    def _fill(self, node: fx.Node) -> bool:
        """Note `memory.copy_(brought)`: from here on the memory has the value brought."""
        memory, source = node.args[:2]
        if memory not in self._memory or source not in self.brought or not alike(memory, source):
            return False
        self._memory.discard(memory)
        self.brought[memory] = self.brought[node] = self.brought[source]
        return True

    def _hand_on(self, node: fx.Node) -> bool:
        source, name = node.args[0] if node.args else None, called_name(node)
        if not isinstance(source, fx.Node) or name not in HAND_ON | HAND_ON_IF_ALIKE:
            return False
        known = next((k for k in (self.given, self.brought) if source in k), None)
        if known is None or not alike(node, source, strides=False):
            return False
        known[node] = known[source]
        return True


def _is_number(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, NUMBERS) for leaf in leaves)


def alike(left: Any, right: Any, *, strides: bool = True) -> bool:
    """Whether the tensors of two nodes are proven to have one type and the same sizes."""
    one, other = tensor_of(left), tensor_of(right)
    if one is None or other is None or one.dtype is not other.dtype or one.dim() != other.dim():
        return False
    numbers = [*zip(one.shape, other.shape, strict=True)]
    numbers += zip(one.stride(), other.stride(), strict=True) if strides else ()
    return one.device == other.device and all(statically_known_true(a == b) for a, b in numbers)


ALL_TO_ALL: Final = "all_to_all_single"
ALL_GATHER: Final = "all_gather_into_tensor"
REDUCE_SCATTER: Final = "reduce_scatter_tensor"


@dataclass(frozen=True, slots=True)
class FunctionExchange:
    """The result at `place` of a function is that of `launch`, in its forward body."""

    place: int
    launch: fx.Node
    source: int
    """Number of the function's input that is sent."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A function that has an all-to-all and does more, and `because`, the reason."""

    because: str
    is_dispatch: bool
    """Whether its split sizes are known at run time only, as those of routed rows."""

    @property
    def reason(self) -> Reason:
        """Why its exchange is of no region."""
        return Reason.NOT_AN_EXCHANGE if self.is_dispatch else Reason.EVEN_SPLITS


def inputs_of(function: fx.Node) -> list[Any]:
    """Return the operator's inputs to its forward body."""
    return [i for i in function.args if not (isinstance(i, fx.Node) and i.op == "get_attr")]


def exchanges_of(function: fx.Node) -> list[FunctionExchange] | Unknown | None:
    """Return the exchanges behind an autograd function's results; None where there are none."""
    graphs = [body.graph for body in bodies(function)]
    if len(graphs) != 2:
        return None
    forward, backward = map(BodyValues.of, graphs)
    if not forward.launches:
        return None
    found = _followed(function, forward, backward)
    sent = [launch for launch in forward.launches if is_all_to_all(launch)]
    if isinstance(found, str):
        return Unknown(found, any(map(has_dynamic_splits, sent))) if sent else None
    return found


def _followed(
    function: fx.Node, forward: BodyValues, backward: BodyValues
) -> list[FunctionExchange] | str:
    """Return the exchanges that the results are, or the obstacle."""
    if any(values.obstacle is not None for values in (forward, backward)):
        return f"it must only exchange, but {_first_obstacle(forward, backward)} is inside it"
    if function.kwargs.get("non_differentiable_idx") or function.kwargs.get("dirty_idx"):
        return "a result has no gradient, or is an input written in place"
    if any(user.target is not operator.getitem for user in function.users):
        return "its results must be read one by one, but one operator reads all of them together"
    found = _results(forward, {user.args[1] for user in function.users})
    if found is None or len(forward.inputs) != len(inputs_of(function)):
        return (
            "every result of its forward must be the result of one collective on one input, "
            "and one is not"
        )
    if not _is_derivative(found, forward, backward):
        return "its backward must be the derivative of its collective, and is not"
    return found


def _first_obstacle(forward: BodyValues, backward: BodyValues) -> str:
    where = "forward" if forward.obstacle is not None else "backward"
    node = forward.obstacle if forward.obstacle is not None else backward.obstacle
    return f"{node} in its {where}"


def _results(forward: BodyValues, read: Set[Any]) -> list[FunctionExchange] | None:
    """Return the results of a forward body, None where one is no result of a collective.

    Torch 2.11 returns all values of a body: one at no place that is `read`, and of no other
    collective, is no result.
    """
    (results, *_) = forward.graph.output_node().args[0]
    results = results if isinstance(results, list | tuple) else (results,)
    all_launches = [forward.brought.get(result) for result in results]
    of_read = {launch for k, launch in enumerate(all_launches) if k in read}
    launches = {
        k: n
        for k, n in enumerate(all_launches)
        if k in read or n not in {None, *of_read, *all_launches[:k]}
    }
    if not launches or {*launches.values()} != {*forward.launches}:
        return None
    sources = {k: forward.inputs.index(forward.given[n.args[0]]) for k, n in launches.items() if n}
    if len({*sources.values()}) != len(launches):
        return None
    if not all(_is_plain(n, forward) for n in launches.values() if n):
        return None
    return [FunctionExchange(k, n, sources[k]) for k, n in launches.items() if n]


def _is_plain(launch: fx.Node, body: BodyValues) -> bool:
    """Whether the derivative is known, and all numbers are known before the body runs."""
    is_known = _short_name(launch) in _DERIVATIVES and not launch.kwargs
    return is_known and body.from_inputs(launch.args[1:])


def _is_derivative(
    found: Sequence[FunctionExchange], forward: BodyValues, backward: BodyValues
) -> bool:
    gradients: Any = backward.graph.output_node().args[0]
    gradients = gradients if isinstance(gradients, list | tuple) else (gradients,)
    if len(gradients) != len(forward.inputs) or len(backward.launches) != len(found):
        return False
    by_source = {one.source: one for one in found}
    for i, gradient in enumerate(gradients):
        one = by_source.get(i)
        if one is None:
            if gradient is not None:
                return False
            continue
        launch = backward.brought.get(gradient)
        if launch is None or backward.given[launch.args[0]] is not backward.inputs[one.place]:
            return False
        if launch.kwargs or _call(launch) != _derivative(one.launch):
            return False
    return True


def _short_name(launch: fx.Node) -> str:
    return overload_name(launch).partition("::")[2]


def _call(launch: fx.Node) -> tuple[Any, ...]:
    """Return the operator of a launch and its arguments behind the tensor, in comparable form."""
    return _short_name(launch), *(_comparable(argument) for argument in launch.args[1:])


def _derivative(launch: fx.Node) -> tuple[Any, ...] | None:
    """Return the call whose result is the input's gradient."""
    name, *arguments = _call(launch)
    return _DERIVATIVES[name](arguments)


_DERIVATIVES: Final[Mapping[str, Callable[[list[Any]], tuple[Any, ...] | None]]] = {
    ALL_TO_ALL: lambda given: (ALL_TO_ALL, given[1], given[0], given[2]),
    ALL_GATHER: lambda given: (REDUCE_SCATTER, "sum", *given),
    REDUCE_SCATTER: lambda given: (ALL_GATHER, *given[1:]) if given[0] == "sum" else None,
}
"""The call that torch registers as the derivative of a functional collective, by its arguments."""


def _comparable(argument: Any) -> Any:
    """Return a number as the program wrote it, not as tracing specialised it on this rank."""
    if isinstance(argument, list | tuple):
        return tuple(map(_comparable, argument))
    value = value_of(argument) if isinstance(argument, fx.Node) else argument
    return value.node._expr if isinstance(value, torch.SymInt) else value


def replace_function(function: fx.Node, found: Sequence[FunctionExchange]) -> None:
    """Replace `function` by plain collectives, awaited."""
    given, emitter = inputs_of(function), Emitter(function)
    awaited = {one.place: _emit(emitter, one, given) for one in found}
    for reader in list(function.users):
        wait = awaited[reader.args[1]]
        launch = wait.args[0]
        assert isinstance(launch, fx.Node)
        wait.meta["example_value"] = launch.meta["example_value"] = value_of(reader)
        substitute(reader, wait)
    erase_dead([function])


def _emit(emitter: Emitter, one: FunctionExchange, given: Sequence[Any]) -> fx.Node:
    body = BodyValues.of(one.launch.graph)
    known = {node: given[body.inputs.index(source)] for node, source in body.given.items()}
    arguments = fx.map_arg(one.launch.args[1:], lambda n: _outside(emitter, n, known))
    rows = given[one.source]
    if one.launch.args[0] not in body.inputs:
        rows = _contiguous(emitter, rows)
    launch = emitter.call(getattr(C10D, _short_name(one.launch)), rows, *arguments)
    wait = emitter.call(C10D.wait_tensor, launch)
    launch.meta["example_value"] = wait.meta["example_value"] = value_of(one.launch)
    return wait


def _outside(emitter: Emitter, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Return a number of the body in the graph around it."""
    if node not in known:
        for needed in node.all_input_nodes:
            _outside(emitter, needed, known)
        copied = known[node] = emitter.copy(node, known)
        copied.meta["example_value"] = value_of(node)
    return known[node]


def _contiguous(emitter: Emitter, rows: fx.Node) -> fx.Node:
    tensor, node = tensor_of(rows), emitter.method("contiguous", rows)
    if tensor is not None and (fake := fake_mode_of([tensor])) is not None:
        with running_on(fake), torch.enable_grad():
            node.meta["example_value"] = tensor.contiguous()
    return node
