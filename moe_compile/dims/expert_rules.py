"""Follow factors through products, selections of one index and joins of all.

Contract
    Adds to `dims/rules.py` what experts are written with. An operator that neither
    knows raises Lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch.fx as fx

from moe_compile.dims import rules
from moe_compile.dims.arguments import dim_of, from_left, joined, moved
from moe_compile.dims.factors import Dims, Factor, Lost, flat, unify
from moe_compile.dims.products import linear_of
from moe_compile.dims.rules import operator_name
from moe_compile.dims.tracker import CUTS, ExpertTracker, cut_dim, move_name
from moe_compile.graph.dependence import written_arguments
from moe_compile.graph.query import argument_of, is_launch, is_wait, operator_at, tensor_of

BATCHED: Final = {"bmm": 0, "baddbmm": 1}
"""Batched products -> the place of their first matrix."""


def follow(tracker: ExpertTracker, node: fx.Node) -> None:
    """Find the factors of `node` from those of its inputs; those from outside begin here."""
    sources = tracker.operands(node)
    for source in sources:
        if source not in tracker:
            tracker.start(source)
    tracker.inherit(node, [] if _joins(node) else sources)
    rule = RULES.get(_name(node))
    if rule is None or is_launch(node) or is_wait(node):
        rules.step(tracker, node)
    elif written_arguments(node):
        raise Lost(f"{operator_at(node)} writes in place")
    else:
        tracker.put(node, rule(tracker, node))


def is_known_by_name(node: fx.Node) -> bool:
    """Whether there is a rule for the operator that `node` calls."""
    name = _name(node)
    return name in RULES or name in rules.RULES


def _name(node: fx.Node) -> str:
    return operator_name(node) or move_name(node)


def _joins(node: fx.Node) -> bool:
    return _name(node) in ("cat", "stack")


def _joined(tracker: ExpertTracker, node: fx.Node) -> Dims:
    dims = tracker.concatenated(node, joined(node), cut_dim(node))
    return tracker.joined(node) if dims is None else dims


def _stacked(tracker: ExpertTracker, node: fx.Node) -> Dims:
    parts = joined(node)
    given = len(tracker.sizes_of(parts[0]))
    factor = tracker.join(node, parts)
    dims = rules.stacked(tracker, node)
    if factor is not None:
        dims[dim_of(node, given + 1, default=0)] = [factor]
    return dims


def _item(tracker: ExpertTracker, node: fx.Node) -> Dims:
    """Follow a piece of a split or of `unbind`, and one index of a dimension."""
    source, index = node.args
    assert isinstance(source, fx.Node)
    if move_name(source) in CUTS and isinstance(index, int):
        if (outer := tracker.outer_of(source)) is not None:
            tracker.pick(node, outer, index % outer.size)
        return tracker.piece(source, index)
    if operator_name(source) == "unbind" and isinstance(index, int):
        at = dim_of(source, len(tracker.dims(source)), default=0)
        return _without(tracker, node, source, at, index)
    if (at_index := one_index(node)) is None:
        return rules.RULES["getitem"](tracker, node)
    return _without(tracker, node, source, *at_index)


def _select(tracker: ExpertTracker, node: fx.Node) -> Dims:
    found = one_index(node)
    if found is None:
        raise Lost(f"{operator_at(node)} selects an unknown index")
    return _without(tracker, node, moved(node), *found)


def one_index(node: fx.Node) -> tuple[int, int] | None:
    """Return the dimension and the index that `x[:, i]` or a `select` takes; None for another."""
    source = node.all_input_nodes[0]
    tensor = tensor_of(source)
    if tensor is None or len(node.all_input_nodes) > 1:
        return None
    if _name(node) == "select":
        dim, index = argument_of(node, 1, "dim"), argument_of(node, 2, "index")
        is_known = isinstance(dim, int) and isinstance(index, int)
        return (from_left(dim, tensor.dim()), index) if is_known else None
    given = node.args[1]
    indices: Sequence[Any] = given if isinstance(given, tuple) else (given,)
    at = len(indices) - 1
    leading = all(one == slice(None) for one in indices[:-1])
    return (at, indices[-1]) if leading and type(indices[-1]) is int else None


def _without(tracker: ExpertTracker, node: fx.Node, source: fx.Node, at: int, index: int) -> Dims:
    """Return the factors of one index of dimension `at`."""
    dims = tracker.dims(source)
    if len(dims[at]) == 1 and not dims[at][0].pieces:
        tracker.pick(node, dims[at][0], index % dims[at][0].size)
    else:
        tracker.closed.append((node, dims[at]))
    return [dim for i, dim in enumerate(dims) if i != at]


def _einsum(tracker: ExpertTracker, node: fx.Node) -> Dims:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or not all(isinstance(o, fx.Node) for o in operands):
        raise Lost(f"{operator_at(node)} is given its operands in an unknown form")
    given, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow or not given.replace(",", "").isalpha():
        raise Lost(f"{operator_at(node)} leaves its result, or dimensions, to be told")
    return _product(tracker, node, given.split(","), result, [o for o in operands if _is_node(o)])


def _batched(tracker: ExpertTracker, node: fx.Node) -> Dims:
    first = BATCHED[_name(node)]
    names = ("input", "batch1", "batch2") if first else ("input", "mat2")
    operands = [argument_of(node, i, name) for i, name in enumerate(names)]
    if not all(map(_is_node, operands)):
        raise Lost(f"{operator_at(node)} is given its operands in an unknown form")
    dims = _product(tracker, node, ["bij", "bjk"], "bik", operands[first:])
    return _plus(tracker, dims, operands[0]) if first else dims


def _matmul(tracker: ExpertTracker, node: fx.Node) -> Dims:
    if linear_of(node) is not None:
        return _linear(tracker, node)
    operands = [argument_of(node, i, name) for i, name in enumerate(("input", "other"))]
    if not all(map(_is_node, operands)):
        raise Lost(f"{operator_at(node)} is given its operands in an unknown form")
    left, right = (len(tracker.dims(operand)) for operand in operands)
    if min(left, right) < 3:
        raise Lost(f"{operator_at(node)} multiplies by a vector or a matrix first")
    batch = "abcdefg"[: max(left, right) - 2]
    letters = [batch[len(batch) - n + 2 :] + pair for n, pair in ((left, "ij"), (right, "jk"))]
    return _product(tracker, node, letters, batch + "ik", operands)


def _linear(tracker: ExpertTracker, node: fx.Node) -> Dims:
    linear = linear_of(node)
    if linear is None:
        raise Lost(f"{operator_at(node)} is given its operands in an unknown form")
    outer = "abcdefgh"[: len(tracker.dims(linear.x)) - 1]
    letters = [outer + "i", "oi" if linear.by_rows else "io"]
    dims = _product(tracker, node, letters, outer + "o", [linear.x, linear.weight])
    return _plus(tracker, dims, linear.bias) if linear.bias is not None else dims


def _product(
    tracker: ExpertTracker,
    node: fx.Node,
    letters: Sequence[str],
    result: str,
    operands: Sequence[fx.Node],
) -> Dims:
    """Follow a sum of products, written as einsum writes it."""
    found: dict[str, list[Factor]] = {}
    for names, operand in zip(letters, operands, strict=True):
        dims = tracker.dims(operand)
        if len(names) != len(dims) or len({*names}) < len(names):
            raise Lost(
                f"{operator_at(node)} names other dimensions than {operator_at(operand)} has"
            )
        for name, dim in zip(names, dims, strict=True):
            known = found.setdefault(name, dim)
            if known is not dim and flat(known) and flat(dim):
                unify(known, dim)
            found[name] = flat(known) or flat(dim)
    tracker.closed += [(node, dim) for name, dim in found.items() if name not in result]
    for names, operand in zip(letters, operands, strict=True):
        if operand in tracker.started():
            tracker.weights.append((node, operand))
            kept = [n for n in names if n in result and _in_others(n, names, letters)]
            tracker.products += [(operand, found[name]) for name in kept if found[name]]
    return [flat(found[name]) for name in result]


def _in_others(name: str, names: str, letters: Sequence[str]) -> bool:
    return sum(name in one for one in letters) > 1 and name in names


def _plus(tracker: ExpertTracker, dims: Dims, added: Any) -> Dims:
    given = tracker.dims(added)
    for dim, other in zip(dims[len(dims) - len(given) :], given, strict=True):
        if flat(other):
            unify(dim, other)
    return [flat(dim) for dim in dims]


def _dropout(tracker: ExpertTracker, node: fx.Node) -> Dims:
    is_training, p = argument_of(node, 2, "training", True), argument_of(node, 1, "p", 0.5)
    if is_training is not False and p != 0.0:
        raise Lost(f"{operator_at(node)} draws random numbers")
    return tracker.dims(moved(node))


def _same(tracker: ExpertTracker, node: fx.Node) -> Dims:
    return tracker.dims(moved(node))


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


RULES: Final[dict[str, Callable[[ExpertTracker, fx.Node], Dims]]] = {
    "einsum": _einsum,
    "matmul": _matmul,
    "mm": _matmul,
    **dict.fromkeys(BATCHED, _batched),
    "linear": _linear,
    "cat": _joined,
    "stack": _stacked,
    "getitem": _item,
    "select": _select,
    "dropout": _dropout,
    "leaky_relu": _same,
}
