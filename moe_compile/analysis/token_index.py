"""What is known of the index that tells each routed row its token.

Contract
    An answer holds for any routing. It rests on the graph's structure: two expressions are the
    same when the same operators read the same inputs, and nothing writes what they read.

Worked example, two experts a token of four: chosen [[2, 0], [0, 3]], flat [2, 0, 0, 3], order
[1, 2, 0, 3], tokens of the rows order // 2 = [0, 1, 0, 1]: every token has two rows.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch.fx as fx

from moe_compile.graph.query import argument_of, called_name, expression_of, tensor_of

FORMS: Final = frozenset(
    {"to", "int", "long", "view", "reshape", "flatten", "contiguous", "ravel", "detach", "squeeze"}
)
"""Methods that keep integers and their flat order."""
FLOOR: Final = "floor"


def is_same_value(left: Any, right: Any) -> bool:
    """Whether two arguments are the same expression: Dynamo writes what is said twice twice."""
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return type(left) is type(right) and bool(left == right)
    if left is right:
        return True
    same_call = (left.op, left.target) == (right.op, right.target)
    if not same_call or left.op not in ("call_function", "call_method") or _is_random(left):
        return False
    mine, other = ([*node.args, *node.kwargs.items()] for node in (left, right))
    return len(mine) == len(other) and all(
        is_same_value(a, b) for a, b in zip(mine, other, strict=True)
    )


def _is_random(node: fx.Node) -> bool:
    name = called_name(node)
    return any(word in name for word in ("rand", "dropout", "bernoulli", "multinomial", "empty"))


def rows_of_each_token(index: fx.Node, tokens: fx.Node) -> int | None:
    """Return how many rows every token has: `k` where `index` is `order // k`, else None.

    `order` must be a permutation of as many rows as `k` times the tokens.
    """
    divided = _divided(index)
    if divided is None or _sorted_by(divided[0]) is None:
        return None
    num_rows, num_tokens = _length(index), _length(tokens)
    k = divided[1]
    return k if num_rows is not None and num_rows == k * num_tokens else None


def chosen_of(index: fx.Node) -> fx.Node | None:
    """Return the indices of the `topk` whose flat order sorts the rows; None when not found.

    A token has at most one row for an expert: `topk` of k chooses k different ones for it.
    """
    divided = _divided(index)
    key = None if divided is None else _sorted_by(divided[0])
    if divided is None or key is None:
        return None
    chosen = _origin(key)
    call = _call_of(chosen, 1, ("topk",))
    if call is None or argument_of(call, 1, "k") != divided[1]:
        return None
    tensor = tensor_of(chosen)
    last = argument_of(call, 2, "dim", -1)
    whole = tensor is not None and expression_of(tensor.numel()) == _length(key)
    return chosen if whole and tensor is not None and last in (-1, tensor.dim() - 1) else None


def counts_values(counts: fx.Node, chosen: fx.Node) -> bool:
    """Whether `counts[e]` is proven to be how often `chosen` holds e."""
    node = _origin(counts)
    if called_name(node) == "bincount" or _is_histogram_of_integers(node):
        return _origin(node.args[0]) is chosen
    if called_name(node) != "sum" or argument_of(node, 1, "dim") not in (0, [0], (0,)):
        return False
    compared = node.args[0]
    if not isinstance(compared, fx.Node) or called_name(compared) not in ("eq", "__eq__"):
        return False
    values, labels = compared.args[:2]
    return (
        isinstance(labels, fx.Node)
        and called_name(labels) == "arange"
        and len(labels.args) == 1
        and isinstance(values, fx.Node)
        and _origin(_column(values)) is chosen
    )


def _is_histogram_of_integers(node: fx.Node) -> bool:
    bins = argument_of(node, 1, "bins")
    bounds = argument_of(node, 2, "min"), argument_of(node, 3, "max")
    return called_name(node) == "histc" and bounds == (0, bins)


def _column(values: fx.Node) -> fx.Node:
    """Return the vector that `v[:, None]` spreads; another form is taken as it is."""
    spread = (slice(None, None, None), None)
    if values.target is operator.getitem and values.args[1] == spread:
        return values.all_input_nodes[0]
    return values


def _divided(index: fx.Node) -> tuple[fx.Node, int] | None:
    """Return (order, k) of `order // k`."""
    index = _origin(index)
    floor = index.target is operator.floordiv or (
        called_name(index) in ("div", "divide") and index.kwargs.get("rounding_mode") == FLOOR
    )
    floor = floor or called_name(index) in ("floor_divide", "__floordiv__")
    if not floor or not isinstance(index.args[0], fx.Node) or type(index.args[1]) is not int:
        return None
    return index.args[0], index.args[1]


def _sorted_by(order: fx.Node) -> fx.Node | None:
    """Return the vector whose sort gives the permutation `order`."""
    order = _origin(order)
    call = order if called_name(order) == "argsort" else _call_of(order, 1, ("sort",))
    key = call.args[0] if call is not None else None
    tensor = tensor_of(key) if isinstance(key, fx.Node) else None
    return key if isinstance(key, fx.Node) and tensor is not None and tensor.dim() == 1 else None


def _call_of(result: fx.Node, position: int, names: tuple[str, ...]) -> fx.Node | None:
    """Return the call of one of `names` whose `position`-th output `result` is."""
    if result.target is not operator.getitem or result.args[1] != position:
        return None
    call = result.args[0]
    return call if isinstance(call, fx.Node) and called_name(call) in names else None


def _origin(node: Any) -> fx.Node:
    """Return where integers come from, before changes of form only."""
    while node.op == "call_method" and node.target in FORMS and isinstance(node.args[0], fx.Node):
        source = tensor_of(node.args[0])
        if source is None or source.dtype.is_floating_point:
            break
        node = node.args[0]
    assert isinstance(node, fx.Node)
    return node


def _length(node: fx.Node) -> Any:
    tensor = tensor_of(node)
    return None if tensor is None or not tensor.dim() else expression_of(tensor.shape[0])
