"""Checks of how many rows a mask takes, which the tracer writes and which always hold.

Contract
    A mask of n rows takes 0 to n of them: a comparison with less, or more, that is asserted and
    read by nothing else may go with the rows. All else that reads a size is no such check.
    A graph is read, not edited.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
import torch.fx as fx

from moe_compile.graph.query import is_assertion, known_rows
from moe_compile.picking.row_index import index_of, is_mask

SIZE_OF = torch.ops.aten.sym_size.int


def readers_of(node: fx.Node) -> list[fx.Node]:
    """Return what reads `node` and does more than such a check."""
    checks = {*size_checks([node])}
    return [user for user in node.users if user not in checks]


def size_checks(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return all nodes of checks of the sizes of `nodes`."""
    found = list[fx.Node]()
    for node in nodes:
        taken = index_of(node)
        if taken is not None and is_mask(taken.index):
            for size in node.users:
                found += _check(size, known_rows(taken.index)) if size.target is SIZE_OF else []
    return found


def _check(size: fx.Node, num_rows: int) -> list[fx.Node]:
    """Return `size`, what compares it and asserts that; [] where something does not always hold."""
    nodes = [size]
    for comparison in size.users:
        bound = comparison.args[1] if len(comparison.args) > 1 else None
        at_least = comparison.target is operator.ge and bound == 0
        at_most = comparison.target is operator.le and isinstance(bound, int) and bound >= num_rows
        is_of_size = comparison.args[:1] == (size,) and (at_least or at_most)
        if not is_of_size or not all(map(is_assertion, comparison.users)):
            return []
        nodes += [comparison, *comparison.users]
    return nodes
