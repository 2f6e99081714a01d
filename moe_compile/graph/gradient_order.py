"""The order in which autograd adds up the gradient of a tensor that several nodes read.

Autograd runs the nodes of a backward pass in the reverse order of their creation (the sequence
numbers of torch/csrc/autograd/engine.cpp). So the terms of a tensor's gradient are added up
from its last reader to its first, and running a reader later moves its term to the front. The first
two terms may change places, adding two numbers commutes, if they are terms of two readers that add
one each, `x * x` adds two, and lie in memory alike (see below); but no two of a graph
inside another, where terms from outside come before them (`note_outer_gradients`).

Contract
    A reader is known to add one term only where running it on the tracer's values shows one edge
    in the graph of gradients; an operator that runs a graph of its own never is.
    A view of memory that is then written through another alias gets its place in the graph of
    gradients when it is next used (`grad_fn` in torch/csrc/autograd/variable.cpp): while one lives,
    no order is known. A view among the outputs has its own place or, as AOTAutograd makes it anew
    from its base, that of the output: the check must hold for both.
    `note_outer_gradients` notes the inputs of a graph inside another whose gradient may have terms
    from the graph outside before its own: if the tensor is read behind the call, or is given to it
    twice, or has such terms itself; every input, if arguments cannot be matched. A body of
    activation checkpointing is part of the program around it for autograd: one sum runs over the
    readers of a tensor inside and outside, from the last to the first.

A term's memory layout matters too: it must lie in memory row by row.
Adding two numbers commutes, yet `a + b` lies in memory as `a` does where the two differ
(`reorder_dimensions` of aten/src/ATen/TensorIterator.cpp), and sums over a tensor round by how it
lies. So two terms may change places only where both lie alike.
A term is known to lie row by row where going back through the reader on fake tensors makes it
so of a gradient laid out in whatever order, or of one that lies row by row and comes from
readers of which the same is known. A dimension along which one number is repeated fits both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, TypeVar

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.graph.aliases import maker, readers
from moe_compile.graph.dependence import Dependence, storages, written_arguments
from moe_compile.graph.inner_graphs import bodies, is_higher_order
from moe_compile.graph.memory import tensors_in
from moe_compile.graph.observation import call, fake_mode_of, running_on
from moe_compile.graph.query import (
    expression_of,
    has_gradient,
    is_assertion,
    is_launch,
    is_wait,
    tensor_of,
    value_of,
)

OUTER_TERMS: Final = "megamoe_outer_terms"
"""Key in the `meta` of an input: terms of its gradient come before those of its graph's readers."""

Part = Callable[[fx.Node, fx.Node], int]
"""Reader and its source -> the number of the part that it belongs to; parts run in order."""


def find_reordered(
    moved: Collection[fx.Node],
    anchor: fx.Node,
    dependence: Dependence,
    part: Part = lambda _reader, _source: 0,
) -> tuple[fx.Node, fx.Node] | None:
    """Return one of `moved` and a tensor it reads whose gradient would change its order of terms.

    `moved` would run just before `anchor`, part by part, each in the order of the graph.
    """
    together = set(moved)
    for source in dict.fromkeys(maker(i) for node in moved for i in node.all_input_nodes):
        if not has_gradient(source):
            continue
        adding = [r for r in readers(source) if adds_gradient(r)]
        if source in together:
            adding = [r for r in adding if r in together]
        elif _has_stale_view(source, anchor, dependence):
            return next(r for r in adding if r in together), source
        for last in (set[fx.Node](), _views_among_outputs(source, adding)):
            order = _Order(dependence.position, anchor, last)
            before = sorted(adding, key=order.before, reverse=True)
            after = sorted(adding, key=lambda r: order.after(r, r in together, part(r, source)))
            if not _is_same_sum(before, after[::-1], source):
                return next(r for r in before if r in together), source
    return None


def find_later_reader(
    together: Collection[fx.Node], source: fx.Node, dependence: Dependence
) -> fx.Node | None:
    """Return the obstacle to reading `source` once for all nodes in `together`, or None.

    Their terms would then be added up before any other is added to them: the order of autograd only
    where all other readers run before the first of them. An input that has terms from outside its
    graph is such an obstacle itself.
    """
    if not has_gradient(source):
        return None
    source, place = maker(source), dependence.position
    adding = [r for r in readers(source) if adds_gradient(r)]
    joined = [r for r in adding if r in together]
    if len(joined) < 2:
        return None
    if source.meta.get(OUTER_TERMS):
        return source
    first, last = min(place[r] for r in joined), _views_among_outputs(source, adding)
    others = (r for r in adding if r not in together)
    return next((r for r in others if place[r] > first or r in last), None)


class _Order:
    """Times at which readers run, as keys to sort them by."""

    def __init__(
        self, position: Mapping[fx.Node, int], anchor: fx.Node, last: set[fx.Node]
    ) -> None:
        self._position, self._there, self._last = position, position[anchor], last

    def before(self, reader: fx.Node) -> tuple[int, int, int, int]:
        """Return the place where the reader runs; those of `last` run with the output."""
        at = self._position[reader]
        return (len(self._position) if reader in self._last else at, 1, 0, at)

    def after(self, reader: fx.Node, moves: bool, part: int) -> tuple[int, int, int, int]:
        """Return the place where it will run."""
        return (self._there, 0, part, self._position[reader]) if moves else self.before(reader)


def _is_same_sum(before: list[fx.Node], after: list[fx.Node], source: fx.Node) -> bool:
    """Whether the terms of readers in one order and in the other make the same sum."""
    if before == after:
        return True
    if source.meta.get(OUTER_TERMS):
        return False
    swapped = [*before[1::-1], *before[2:]]
    if after != swapped or not all(_adds_one_term(r, source) for r in before[:2]):
        return False
    return all(lies_by_rows(r, source) for r in before[:2])


def adds_gradient(reader: fx.Node) -> bool:
    """Whether `reader` adds a term to the gradient of its inputs; nodes of unknown value may.

    The output does too: its term is the first.
    """
    if is_assertion(reader):
        return False
    return value_of(reader) is None or has_gradient(reader)


def _adds_one_term(reader: fx.Node, source: fx.Node) -> bool:
    """Whether `reader` is seen to add one term to the gradient of `source`, not several."""
    arguments = pytree.tree_leaves((reader.args, reader.kwargs))
    if sum(isinstance(a, fx.Node) and maker(a) is source for a in arguments) != 1:
        return False
    if reader.op == "output" or is_launch(reader) or is_wait(reader):
        return True
    return not is_higher_order(reader) and _num_edges(reader, source) == 1


def _num_edges(reader: fx.Node, source: fx.Node) -> int:
    """Return the number of edges of the graph of gradients that lead to `source`; 0 if unknown."""

    def count(made: Any, read: torch.Tensor) -> int:
        return sum(found is read.grad_fn for found in _edges(made))

    return on_gradient(reader, source, count) or 0


def _edges(made: Any) -> Iterator[Any]:
    """Yield the end of each edge that can be reached from the tensors in `made`."""
    leaves = pytree.tree_leaves(made)
    todo = [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor)]
    seen: set[Any] = set()
    while todo:
        function = todo.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        for following, _ in function.next_functions:
            yield following
            todo.append(following)


def _has_stale_view(source: fx.Node, anchor: fx.Node, dependence: Dependence) -> bool:
    """Whether a view of the memory of `source` is used after a write through another alias."""
    memory, place = storages(source), dependence.position
    for writer, written in dependence.writes.items():
        if place[writer] > place[anchor] or not written & memory:
            continue
        values = {id(value_of(a)) for a in written_arguments(writer)}
        for node in dependence.position:
            tensor = tensor_of(node)
            if tensor is None or id(tensor) in values or not storages(node) & memory:
                continue
            used_after = any(place[u] > place[writer] for u in node.users)
            if place[node] < place[writer] and tensor._is_view() and used_after:
                return True
    return False


def _views_among_outputs(source: fx.Node, adding: list[fx.Node]) -> set[fx.Node]:
    """Return those of `adding` that make a view of `source` which the graph returns."""
    memory = storages(source)

    def is_given_out(node: fx.Node) -> bool:
        views = (user for user in node.users if storages(user) & memory)
        return any(u.op == "output" for u in node.users) or any(map(is_given_out, views))

    return {r for r in adding if r.op != "output" and storages(r) & memory and is_given_out(r)}


Found = TypeVar("Found")
Lay = Callable[[torch.Tensor], torch.Tensor]
"""A function that returns a tensor of the same shape, laid out in some order."""


def lies_by_rows(reader: fx.Node, source: fx.Node) -> bool:
    """Whether the term that `reader` adds to the gradient of `source` lies row by row."""
    return _Terms().lies_by_rows(reader, source)


class _Terms:
    """A cache of answers about terms: graphs have several ways from one node to another."""

    def __init__(self) -> None:
        self._known: dict[tuple[fx.Node, fx.Node], bool] = {}

    def lies_by_rows(self, reader: fx.Node, source: fx.Node) -> bool:
        key = (reader, source)
        if key not in self._known:
            self._known[key] = False  # for a path that leads back to itself
            self._known[key] = self._lies_by_rows(reader, source)
        return self._known[key]

    def _lies_by_rows(self, reader: fx.Node, source: fx.Node) -> bool:
        tensor = tensor_of(source)
        if tensor is None or tensor.dim() < 2 or is_launch(reader):
            return tensor is not None
        if reader.op == "output":  # AOTAutograd takes gradients of outputs laid out as these are
            return _by_rows(tensor)
        if is_wait(reader):
            return self._all_readers(reader)
        plain, reverse = (_term(reader, source, lay) for lay in (_row_by_row, _in_reverse))
        if plain is None or not _by_rows(plain):
            return False
        return (reverse is not None and _by_rows(reverse)) or self._all_readers(reader)

    def _all_readers(self, node: fx.Node) -> bool:
        adding = [r for r in readers(node) if r.op == "output" or has_gradient(r)]
        return tensor_of(node) is not None and all(self.lies_by_rows(r, node) for r in adding)


def _by_rows(tensor: torch.Tensor) -> bool:
    plain = torch.empty(tensor.shape, device="meta").stride()
    pairs = zip(tensor.stride(), plain, strict=True)
    return all(expression_of(a) in (0, expression_of(b)) for a, b in pairs)


def _term(reader: fx.Node, source: fx.Node, lay: Lay) -> torch.Tensor | None:
    """Return the term of `reader` for gradients laid out by `lay`; None where it is not known."""

    def term(made: Any, read: torch.Tensor) -> torch.Tensor:
        leaves = tensors_in(made)
        each = [t for t in leaves if t.requires_grad]
        return torch.autograd.grad(each, read, list(map(lay, each)))[0]

    return on_gradient(reader, source, term)


def on_gradient(
    reader: fx.Node, source: fx.Node, look: Callable[[Any, torch.Tensor], Found]
) -> Found | None:
    """Run `reader` on fake tensors of which `source` needs a gradient.

    Returns what `look` finds in the result and in the input for `source`; None where the node
    cannot be run.
    """
    inputs = reader.all_input_nodes
    fake = fake_mode_of([*map(value_of, inputs), value_of(reader)])
    if fake is None or is_higher_order(reader) or any(value_of(i) is None for i in inputs):
        return None
    with running_on(fake), torch.enable_grad():
        given: dict[fx.Node, Any] = {}
        for node in inputs:
            value = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value_of(node))
            if isinstance(value, torch.Tensor) and maker(node) is source:
                read = value = value.requires_grad_() * 1
            given[node] = value
        args, kwargs = fx.node.map_arg((reader.args, reader.kwargs), given.__getitem__)
        try:
            return look(call(reader, args, kwargs), read)
        except Exception:  # noqa: BLE001  (whatever a function raises: it is not followed)
            return None


def _row_by_row(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _in_reverse(tensor: torch.Tensor) -> torch.Tensor:
    dims = [*range(tensor.dim() - 1, -1, -1)]
    shape = [tensor.shape[d] for d in dims]
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device).permute(dims)


def note_outer_gradients(graph: fx.Graph) -> None:
    """Note the inputs of the graphs that operators of `graph` run."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        for body in bodies(node):
            given = [i for i in _given_nodes(node) if i.op != "get_attr"]
            inputs = body.graph.find_nodes(op="placeholder")
            is_known = len(given) == len(inputs)
            for number, inner in enumerate(inputs):
                if not is_known or _has_outer_terms(given[number], node, given, place):
                    inner.meta[OUTER_TERMS] = True


def _given_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """Return the nodes among the arguments, each as often as it is given."""
    for argument in node.args:
        several = argument if isinstance(argument, list | tuple) else (argument,)
        yield from (one for one in several if isinstance(one, fx.Node))


def _has_outer_terms(
    given: fx.Node, call: fx.Node, all_given: list[fx.Node], place: dict[fx.Node, int]
) -> bool:
    if not has_gradient(given):
        return False
    source = maker(given)
    if source.meta.get(OUTER_TERMS) or sum(maker(one) is source for one in all_given) > 1:
        return True
    return any(place[r] > place[call] and adds_gradient(r) for r in readers(source))
