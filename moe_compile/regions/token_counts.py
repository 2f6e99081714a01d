"""Whether counts are proven to be how often each expert was chosen.

Contract
    An answer holds for any routing. Counted are all values of a tensor, by `bincount`, by `histc`
    with a bin for each, by adding ones at each value to zeros, or by a comparison with a range.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch.fx as fx

from moe_compile.graph.query import expression_of, is_integer, number_of, tensor_of
from moe_compile.graph.torch_calls import torch_name
from moe_compile.regions.label_bins import FLOATS, bins_of
from moe_compile.regions.row_chain import num_rows, shape_of, type_of
from moe_compile.regions.token_index import CASTS, HOLDS_ALL, TokenIndex
from moe_compile.regions.token_sums import OF_ZEROS, is_zeros

TO_FLOATS: Final = ("to", "float", "double")
ONES: Final = frozenset({"ones", "ones_like", "new_ones"})


def counts_values(known: TokenIndex, counts: fx.Node, chosen: fx.Node) -> bool:
    """Whether `counts[e]` is proven to be how often `chosen`, results of a `topk`, holds e."""
    if type_of(node := known.origin(counts)) not in HOLDS_ALL:
        return False
    if (counted := _added(known, node) or _compared(known, node)) is not None:
        return known.origin(counted) is chosen
    if (given := known.arguments(node, "bincount", "input", "weights", "minlength")) is not None:
        counted = _node(given.get("input"))
        return given.get("weights") is None and _is(known, counted, chosen)
    binned = _before_cast(known, node, CASTS)
    given = known.arguments(binned, "histc", "input", "bins", "min", "max")
    labels = None if given is None else _node(given.get("input"))
    if given is None or labels is None or not _has_bins(known, chosen, labels, given):
        return False
    return _is(known, _before_cast(known, labels, TO_FLOATS), chosen)


def _is(known: TokenIndex, node: fx.Node | None, chosen: fx.Node) -> bool:
    return node is not None and known.origin(node) is chosen


def _before_cast(known: TokenIndex, node: fx.Node, casts: tuple[str, ...] | frozenset[str]) -> Any:
    """Return what a cast between integers and floating-point numbers was made of, or `node`."""
    source = _node(node.args[0]) if node.op == "call_method" and node.target in casts else None
    if source is None or known.is_written(node):
        return node
    types = {type_of(source), type_of(node)}
    both = len(types & {*FLOATS}) == len(types & {*HOLDS_ALL}) == 1
    return source if both else node


def _has_bins(known: TokenIndex, chosen: fx.Node, labels: fx.Node, given: dict[str, Any]) -> bool:
    """Whether each label that `topk` may choose has its own bin, or none if there is no more."""
    topk = known.topk_of(chosen) or {}
    scores, dtype = _node(topk.get("input")), type_of(labels)
    shape = [] if scores is None else shape_of(scores)
    num_labels = number_of(shape[topk.get("dim", -1)]) if shape else None
    bins = given.get("bins")
    if num_labels is None or dtype is None or type(bins) is not int:
        return False
    found = bins_of(range(num_labels), dtype, bins, given.get("min"), given.get("max"))
    return found == tuple(label if label < bins else None for label in range(num_labels))


def _added(known: TokenIndex, node: fx.Node) -> fx.Node | None:
    """Return the values v of `zeros(n).scatter_add(0, v, ones_like(v))`."""
    given = known.arguments(node, "scatter_add", "input", "dim", "index", "src")
    if given is None or given.get("dim") not in (0, -1):
        return None
    base, values, ones = (_node(given.get(name)) for name in ("input", "index", "src"))
    if base is None or values is None or ones is None or known.is_written(values):
        return None
    makes_one = torch_name(ones) in ONES and ones.kwargs.keys() <= OF_ZEROS
    if not is_zeros(base) or not makes_one or known.is_written(base) or known.is_written(ones):
        return None
    return values if len(shape_of(values)) == 1 else None


def _compared(known: TokenIndex, node: fx.Node) -> fx.Node | None:
    """Return the values v of `(v[:, None] == arange(n)).sum(0)`."""
    given = known.arguments(node, "sum", "input", "dim", "keepdim", "dtype")
    if given is None or given.get("dim") not in (0, [0], (0,)) or given.get("keepdim"):
        return None
    compared = given.get("input")
    pairs = (known.arguments(compared, name, "input", "other") for name in ("eq", "__eq__"))
    pair = next(filter(None, pairs), {})
    values, labels = _node(pair.get("input")), _node(pair.get("other"))
    if values is None or labels is None or not _is_range(known, labels):
        return None
    column = tensor_of(values)
    numel = None if column is None else expression_of(column.numel())
    crossed = shape_of(compared) == [numel, num_rows(labels)]
    return _column(values) if crossed and not known.is_written(values) else None


def _is_range(known: TokenIndex, node: fx.Node) -> bool:
    """Whether the node is 0, 1, ... in order."""
    given = known.arguments(node, "arange", "end", "dtype", "device")
    return given is not None and len(node.args) == 1 and is_integer(node)


def _column(values: fx.Node) -> fx.Node:
    """Return the vector that `v[:, None]` spreads; another form is taken as it is."""
    spread = (slice(None, None, None), None)
    if values.target is operator.getitem and values.args[1] == spread:
        return values.all_input_nodes[0]
    return values


def _node(argument: Any) -> fx.Node | None:
    return argument if isinstance(argument, fx.Node) else None
