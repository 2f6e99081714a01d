"""Follow indices that are tensors: rows that one takes, and places that several name together.

Contract
    Of `x[:, i]` the places are those of i. Of `x[p, i]`, where p counts the indices of the first
    dimension, `torch.arange(len(x))`, each takes from its own: p is followed as that dimension, and
    a part counts its own anew. The same holds for `x[p, i] = y`. If p is read in any other way too,
    its numbers are those of the whole: such an index is not followed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import torch.fx as fx

from moe_compile.dims.factors import Dims, Lost, flat, unify
from moe_compile.dims.tracker import Tracker
from moe_compile.graph.query import is_integer, operator_at, tensor_of
from moe_compile.graph.torch_calls import torch_name

FORMS: Final = frozenset({"view", "reshape", "unsqueeze", "to", "long", "contiguous"})
"""Methods that p may go through on its way to an index, beside `p[:, None]`."""
BOUNDS: Final = {"start", "end", "step"}
INDEXED: Final = (operator.getitem, operator.setitem)


def is_taken(node: fx.Node) -> bool:
    """Whether the node is `x[...]`, or writes it, by tensors of integers among others."""
    if node.target not in INDEXED or tensor_of(_source(node)) is None:
        return False
    return any(isinstance(one, fx.Node) and is_integer(one) for one in _indices(node))


def taken(tracker: Tracker, node: fx.Node) -> Dims:
    """Return the factors of the entries taken; for a write, those of the whole tensor."""
    source = _source(node)
    indices = _aligned(_indices(node), len(tracker.dims(source)))
    several = [i for i, one in enumerate(indices) if isinstance(one, fx.Node | int)]
    if len(several) > 1:
        _check_places(tracker, node, [indices[i] for i in several], several)
    places = _places(tracker, node, indices, several)
    if node.target is not operator.setitem:
        return places
    _write(tracker, node, places)
    return tracker.dims(source)


def _aligned(indices: list[Any], num_dims: int) -> list[Any]:
    """Return one index for each dimension, plus a None for each new one."""
    given = indices if ... in indices else [*indices, ...]
    at, named = given.index(...), sum(one is not None and one is not ... for one in given)
    return [*given[:at], *[slice(None)] * (num_dims - named), *given[at + 1 :]]


def _places(
    tracker: Tracker, node: fx.Node, indices: Sequence[Any], several: Sequence[int]
) -> Dims:
    """Return the factors of the places that are indexed; note those that are not treated apart."""
    dims: Dims = []
    rest = iter(tracker.dims(_source(node)))
    for i, one in enumerate(indices):
        dim = [] if one is None else next(rest)
        if i in several and (i > 0 or len(several) == 1):
            tracker.closed.append((node, dim))
        if i == several[0]:
            dims += _broadcast(tracker, indices[several[0] : several[-1] + 1])
        elif one is None or one == slice(None):
            dims.append(dim)
        elif i not in several:
            raise Lost(
                f"{operator_at(node)} indexes by a slice and by tensors together, which "
                "megamoe does not follow"
            )
    return dims


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _indices(node: fx.Node) -> list[Any]:
    given = node.args[1]
    return list(given) if isinstance(given, tuple) else [given]


def _broadcast(tracker: Tracker, indices: Sequence[Any]) -> Dims:
    """Return the common factors of tensors that index together."""
    each = [tracker.dims(one) for one in indices if isinstance(one, fx.Node)]
    together: Dims = [[] for _ in range(max(map(len, each)))]
    for dims in each:
        for i, dim in enumerate(dims, len(together) - len(dims)):
            if flat(together[i]) and flat(dim):
                unify(together[i], dim)
            together[i] = flat(together[i]) or flat(dim)
    return together


def _check_places(
    tracker: Tracker,
    node: fx.Node,
    indices: Sequence[Any],
    where: Sequence[int],
) -> None:
    """Have the first of several indices count the first dimension; raise Lost unless it does."""
    first = indices[0]
    counted = _counted(first) if isinstance(first, fx.Node) else None
    if list(where) != list(range(len(where))) or counted is None or not counts_places(counted):
        raise Lost(f"{operator_at(node)} indexes by a tensor")
    own = [dim for dim in tracker.dims(first) if flat(dim)]
    if len(own) != 1:
        raise Lost(f"{operator_at(node)} indexes by a tensor")
    unify(tracker.dims(_source(node))[0], own[0])


def _counted(place: fx.Node) -> fx.Node | None:
    """Return the `arange` from 0 on that `place` is another form of."""
    node = place
    while torch_name(node) != "arange":
        is_form = node.op == "call_method" and node.target in FORMS
        if not (is_form or _adds_dimensions(node)) or len(node.all_input_nodes) != 1:
            return None
        (node,) = node.all_input_nodes
    first, *others = node.args
    is_from_0 = not others or (len(others) == 1 and first == 0 and type(first) is int)
    return node if is_from_0 and is_integer(node) and not node.kwargs.keys() & BOUNDS else None


def _adds_dimensions(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    return all(one is None or one == slice(None) or one is ... for one in _indices(node))


def counts_places(node: fx.Node) -> bool:
    """Whether the node counts from 0, and all readers use it as places of a first dimension."""
    if _counted(node) is None:
        return False
    todo = [node]
    while todo:
        one = todo.pop()
        for user in one.users:
            if _is_first_of_several(user, one):
                continue
            if _counted(user) is None:
                return False
            todo.append(user)
    return True


def _is_first_of_several(user: fx.Node, index: fx.Node) -> bool:
    """Whether `user` is `x[index, ...]`, by other indices too, and reads `index` only there."""
    if user.target not in INDEXED or _source(user) is index:
        return False
    first, *others = _indices(user)
    is_named = any(isinstance(one, fx.Node | int) for one in others)
    return first is index and is_named and index not in (*others, *user.args[2:])


def _write(tracker: Tracker, node: fx.Node, places: Dims) -> None:
    """Unify the factors of the tensor written and of the places it is written to."""
    value = node.args[2]
    if not isinstance(value, fx.Node):
        return
    dims = tracker.dims(value)
    for mine, its in zip(places[len(places) - len(dims) :], dims, strict=True):
        if flat(its):
            unify(mine, its)
