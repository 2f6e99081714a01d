"""What the tensors of an `autograd.Function`'s body are: its inputs, or what a collective brought.

Contract
    A body is followed as long as it moves no value but by collectives: inputs are handed on,
    collectives are launched on them and awaited, what they brought is copied into new memory, and
    the host computes sizes. The first node that does anything else ends it.
    A node that is called `given` or `brought` has the values, the type and the sizes of what it is
    said to be, in every run.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from moe_compile.graph.effects import is_host_arithmetic
from moe_compile.graph.modes import changes_mode
from moe_compile.graph.query import (
    called_name,
    is_assertion,
    is_launch,
    is_wait,
    overload_name,
    tensor_of,
    value_of,
)

HAND_ON: Final = frozenset({"view_as", "alias", "detach"})
"""Functions and methods that return the values of their first argument as they are."""
HAND_ON_IF_ALIKE: Final = frozenset({"contiguous", "clone", "view", "reshape", "to", "flatten"})
"""Those that do so where type and sizes stay what they were."""
MAKE_MEMORY: Final = frozenset(
    {"empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros"}
)
"""Those that make a tensor which nothing else has."""
NUMBERS: Final = (int, torch.SymInt, torch.SymBool)
READ_SIZES: Final = frozenset({"size", "numel", "dim"})


@dataclass(slots=True)
class BodyValues:
    """See the module docstring."""

    graph: fx.Graph
    given: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Node -> the input of the body that it is."""
    brought: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Node -> the launch whose result, awaited, it is."""
    sizes: set[fx.Node] = field(default_factory=set)
    """Numbers that the host computes of sizes."""
    obstacle: fx.Node | None = None
    """The first node that is not followed."""
    _memory: set[fx.Node] = field(default_factory=set)
    """New memory that nothing has filled."""

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
        """Whether numbers are computed of what the body is given alone."""
        nodes = [n for n in pytree.tree_leaves(numbers) if isinstance(n, fx.Node)]
        of_inputs = (n in self.given or self.from_inputs(n.all_input_nodes) for n in nodes)
        return all(n in self.given or n in self.sizes for n in nodes) and all(of_inputs)

    def _is_size(self, node: fx.Node) -> bool:
        """Whether the host computes a number of sizes."""
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
        """Take `memory.copy_(brought)`: from here on the memory is what was brought."""
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
