"""Integers that the host reads of counts, and which add up over parts as the counts do.

Contract
    Each part's experts need its own integers on the host, so that those of the whole, which a model
    keeps or returns, are their sums: the host reads nothing for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import torch
import torch.fx as fx

from moe_compile.attention.head_rules import operator_name
from moe_compile.graph.query import tensor_of
from moe_compile.regions.host_reads import is_host_read

ADDS_UP: Final = frozenset(
    {
        "contiguous", "cpu", "detach", "flatten", "getitem", "item", "reshape", "select", "squeeze",
        "sum", "to", "unsqueeze", "view",
    }
)  # fmt: skip
"""What of a sum is the sum of what it makes of the terms."""
WIDE: Final = (torch.int32, torch.int64)


def reads_that_add_up(nodes: Iterable[fx.Node], sums: Collection[fx.Node]) -> set[fx.Node]:
    """Return those of `nodes` by which the host reads what adds up, of one of `sums`."""
    return {node for node in nodes if is_host_read(node) and _adds_up(node, sums)}


def _adds_up(node: fx.Node, sums: Collection[fx.Node]) -> bool:
    while node not in sums:
        tensor, sources = tensor_of(node), node.all_input_nodes
        is_wide = tensor is None or tensor.dtype in WIDE
        if not is_wide or operator_name(node) not in ADDS_UP or len(sources) != 1:
            return False
        (node,) = sources
    return True
