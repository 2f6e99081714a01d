"""Sizes while a graph is written: numbers, or nodes; those on the device by one copy to the host.

Contract
    However many integers are asked for, `finish` emits one copy to the host. Integers that are
    elements of one vector are copied as that vector: each by itself would be a kernel of its own.
    Where a sum of integers is asked for too, the last of them is computed from it: tensors whose
    size is the sum have one symbol as their size.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moe_compile.graph.edit import Emitter, forget_slice_sizes
from moe_compile.graph.effects import is_host_arithmetic
from moe_compile.graph.inner_graphs import bodies
from moe_compile.graph.query import called_name, known_rows, tensor_of
from moe_compile.regions.body_nodes import is_move_to_host

Size: TypeAlias = int | fx.Node

RESHAPES: Final = ("view", "reshape")


def extent(emit: Emitter, node: fx.Node, dim: int) -> Size:
    """Return the size of dimension `dim` of the tensor `node`."""
    tensor = tensor_of(node)
    size = None if tensor is None else tensor.shape[dim]
    if size is None or isinstance(size, torch.SymInt):
        return emit.method("size", node, dim)
    return int(size)


def most_of(size: int | torch.SymInt) -> int | None:
    """Return the upper bound of a size that is known at run time alone, if it has one."""
    if isinstance(size, int) or not free_unbacked_symbols(size):
        return None
    most = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(most) if most.is_Integer else None


def times(emit: Emitter, left: Size, right: Size) -> Size:
    """Return the product of two sizes."""
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    return emit.call(operator.mul, left, right)


def name_inferred_size(copied: fx.Node, original: fx.Node) -> None:
    """Write the size for which a reshape has -1, where it is a number in `original`.

    A chunk may be without rows, where torch cannot infer a size beside that of the rows. The
    same is done in functions that the node calls, as a checkpoint does: chunks run them too.
    """
    for body in bodies(original):
        for inner in body.graph.nodes:
            name_inferred_size(inner, inner)
        body.recompile()
    made = tensor_of(original)
    if called_name(copied) not in RESHAPES or made is None or not copied.args:
        return

    def known(sizes: Any) -> tuple[Any, ...]:
        pairs = zip(sizes, made.shape, strict=True)
        return tuple(n if s == -1 and type(n) is int else s for s, n in pairs)

    source, *sizes = copied.args
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        copied.args = (source, known(sizes[0]))
    elif len(sizes) == made.dim():
        copied.args = (source, *known(sizes))
    for name in {"shape", "size"} & copied.kwargs.keys():
        copied.kwargs = {**copied.kwargs, name: known(copied.kwargs[name])}


CONSTRAIN_RANGE: Final = torch.ops.aten.sym_constrain_range.default
"""Operator that states and checks the range of a number, by one check; an assertion makes two."""
ASSERT: Final = torch.ops.aten._assert_scalar.default
SPLITS_DO_NOT_FIT: Final = "Split sizes doesn't match total dim 0 size"
"""The program's own message where counts do not fit the rows; chunks use the same."""


def forget_bindings(graph: fx.Graph) -> None:
    """Remove bindings of symbols for sizes that the bounds of new reads determine.

    Of `rows[:sum(splits)]` Dynamo knows no more than that its size is some number: the integers it
    is made of could be negative. Here they are known not to be, so that AOTAutograd finds the size
    in terms of them, and would refuse a node that says it binds a symbol.
    """
    bounds = graph.find_nodes(op="call_function", target=CONSTRAIN_RANGE)
    known = {bound.args[0]: None for bound in bounds if "example_value" not in bound.args[0].meta}
    todo = list(known)
    while todo:
        for user in todo.pop().users:
            if is_host_arithmetic(user) and user not in known:
                known[user] = None
                todo.append(user)
    readers = {user for number in known for user in number.users}
    for reader in readers:
        reader.meta.pop("unbacked_bindings", None)
    forget_slice_sizes(graph)


class Place(NamedTuple):
    """The place of an integer: an element of a vector, or, without a length, a tensor by itself."""

    tensor: fx.Node
    element: int = 0
    length: int = 0


class BulkRead:
    """Collects the integers that the host needs; one copy to the host serves all of them."""

    def __init__(self, emit: Emitter) -> None:
        """Emit through `emit`."""
        self._emit = emit
        self._places: list[Place] = []
        self._asked: dict[int, dict[fx.Node, int]] = {}
        self._rests: dict[Place, tuple[Place, list[Place]]] = {}

    def add(self, source: fx.Node) -> int:
        """Ask for the value of a tensor of one integer; return its number in the bulk read."""
        return self._add(Place(source))

    def add_vector(self, source: fx.Node, length: int) -> list[int]:
        """Ask for the elements of a vector; return their numbers in the bulk read."""
        return [self._add(Place(source, element, length)) for element in range(length)]

    def ask(self, chunk: object, item: fx.Node, source: fx.Node) -> None:
        """Ask for the value of the region's host read `item`, in `chunk` read from `source`."""
        written = item.args[0]
        assert isinstance(written, fx.Node)
        self._asked.setdefault(id(chunk), {})[item] = self._add(_place(source, written))

    def asked_by(self, chunk: object) -> dict[fx.Node, int]:
        """Return the number in the bulk read of each host read that `chunk` asked for."""
        return self._asked.get(id(chunk), {})

    def add_sum(self, source: fx.Node, chunk: object, items: Sequence[object]) -> int:
        """Ask for the value of `source`, the sum of the host reads `items` of `chunk`.

        The last one of them is not read if `chunk` asked for all.
        """
        number, asked = self.add(source), self.asked_by(chunk)
        if items and all(isinstance(item, fx.Node) and item in asked for item in items):
            *others, last = (self._places[asked[item]] for item in items)
            if last not in others:
                self._rests[last] = (self._places[number], others)
        return number

    def finish(self) -> list[fx.Node]:
        """Emit the bulk read; return the integers in the order they were asked for."""
        emit = self._emit
        starts: dict[fx.Node, int] = {}
        pieces: list[fx.Node] = []
        num_before = 0
        for tensor, _, length in self._places:
            if tensor not in starts:
                starts[tensor] = num_before
                num_before += length or 1
                piece = tensor if length else emit.method("reshape", tensor, 1)
                pieces.append(emit.method("to", piece, torch.int64))
        host = emit.method("to", emit.call(torch.cat, pieces), torch.device("cpu"))
        values: dict[Place, fx.Node] = {}
        for place in dict.fromkeys(self._places):
            if place not in self._rests:
                at = starts[place.tensor] + place.element
                values[place] = emit.method("item", emit.call(operator.getitem, host, at))
                emit.call(CONSTRAIN_RANGE, values[place], min=0)
        for place, (total, others) in self._rests.items():
            values[place] = values[total]
            if others:
                known = emit.call(torch.sym_sum, [values[other] for other in others])
                values[place] = emit.call(operator.sub, values[total], known)
                is_count = emit.call(operator.ge, values[place], 0)
                emit.call(
                    ASSERT,
                    is_count,
                    "the parts of a chunk must have as many rows as the chunk, and have more",
                )
        return [values[place] for place in self._places]

    def _add(self, place: Place) -> int:
        self._places.append(place)
        return len(self._places) - 1


def _place(source: fx.Node, written: fx.Node) -> Place:
    """Return the place of `source`; it is `written`, or a copy of that for a chunk.

    A chunk has as many counts as the region, which fixes the length of the vector.
    """
    while is_move_to_host(written) and isinstance(written.args[0], fx.Node):
        written = written.args[0]
    if {source.target, written.target} != {operator.getitem} or source.args[1] != written.args[1]:
        return Place(source)
    (vector, index), of_region = source.args, written.args[0]
    if not (isinstance(vector, fx.Node) and isinstance(of_region, fx.Node) and type(index) is int):
        return Place(source)
    tensor = tensor_of(of_region)
    length = known_rows(of_region) if tensor is not None and tensor.dim() == 1 else 0
    return Place(vector, index % length, length) if length else Place(source)
