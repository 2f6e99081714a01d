"""A check that factors of rows are scores of the rows' own tokens.

Contract
    Raises Left unless each factor is proven to be, row by row, a tensor's entry for the row's
    token, or for its token and choice: the rows of a part then have the same factors.
"""

from __future__ import annotations

import operator
from typing import Final

import torch.fx as fx

from moe_compile.batch.batch_split import SplitRegion
from moe_compile.dims.factors import Factor, flat
from moe_compile.dims.tracker import Tracker
from moe_compile.graph.query import argument_of, operator_at
from moe_compile.graph.torch_calls import torch_name
from moe_compile.journal.reasons import Left, Reason
from moe_compile.regions.row_chain import CASTS
from moe_compile.regions.token_index import TokenIndex

FORMS: Final = frozenset(
    {"reshape", "view", "unsqueeze", "contiguous", "detach", "flatten", "unflatten", "squeeze"}
)
TAKES: Final = ("index_select", "gather")


def check_factors(split: SplitRegion, tracker: Tracker) -> None:
    """Raise Left for a factor of the region's rows that is not of their tokens alone."""
    found = split.found
    assert found.chosen is not None
    index, order = found.index, TokenIndex(frozenset()).order_of(found.index)
    by_choice = [f for dim in tracker.dims(found.chosen) for f in flat(dim)]
    by_token = flat(tracker.dims(found.tokens)[0])
    orders: dict[fx.Node | None, list[Factor]] = {order: by_choice, index: by_token}
    if split.share is not None:
        by_both = [*by_token, *flat(tracker.dims(found.chosen)[-1])]
        orders |= {node: by_both for node in split.share.shifted}
        orders |= {node: by_choice for node in split.share.shifted.values()}
    for factor in found.factors:
        taken = _taken(factor)
        if taken is None:
            raise Left(Reason.BATCH_MIXED, operator_at(factor))
        source, by = taken
        if source not in tracker or flat(tracker.dims(source)[0]) != orders.get(by):
            raise Left(Reason.BATCH_MIXED, operator_at(factor))


def _taken(factor: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the tensor whose rows `factor` takes, and the index of these rows."""
    node = factor
    while True:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        if (by := _index_of(node)) is not None:
            return source, by
        is_form = node.op == "call_method" and node.target in FORMS | CASTS
        if not (is_form or _adds_a_dimension(node)) or len(node.all_input_nodes) != 1:
            return None
        node = source


def _index_of(node: fx.Node) -> fx.Node | None:
    """Return the index by which `node` takes rows of a tensor: `x[i]`, `x[i, None]`, `x[i, :]`."""
    if torch_name(node) in TAKES and argument_of(node, 1, "dim") == 0:
        index = argument_of(node, 2, "index")
        return index if isinstance(index, fx.Node) else None
    given = node.args[1] if node.target is operator.getitem else None
    first, *others = given if isinstance(given, tuple) else (given,)
    is_whole = all(one is None or one == slice(None) for one in others)
    return first if isinstance(first, fx.Node) and is_whole else None


def _adds_a_dimension(node: fx.Node) -> bool:
    """Whether the node is `x[:, None]` or the like: all rows, in another form."""
    given = node.args[1] if node.target is operator.getitem else None
    indices = given if isinstance(given, tuple) else ()
    is_whole = all(one is None or one == slice(None) for one in indices)
    return is_whole and indices[:1] == (slice(None),)
