"""What tells the experts of tokens: behind which gather it is known, how often the host reads it.

Contract
    Reads a graph as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.legality import Legality
from moe_compile.graph.modes import modes
from moe_compile.graph.query import called_name, group_name, is_launch, value_of


def behind_routing(gather: fx.Node, needed: Iterable[fx.Node], dependence: Dependence) -> fx.Node:
    """Return the node behind the last gather that `needed` come from; `gather` without one.

    As well where the tokens are written before it, or a mode is switched.
    """
    group, above = group_name(gather), dependence.above(needed)
    launches = (n for n in above if is_launch(n) and n > gather and group_name(n) == group)
    there = max(launches, default=gather.prev).next
    legality, mode = Legality(dependence, gather.graph), modes(gather.graph)
    is_same = mode[there] == mode[gather]
    may_wait = is_same and legality.written_meanwhile([gather], there) is None
    return there if may_wait else gather


def num_host_reads(indices: Iterable[fx.Node], dependence: Dependence) -> int:
    """Return how often the host reads a number that the lengths of `indices` come from.

    An operator whose result is as long as it finds reads one; a slice between numbers reads none.
    """
    searches = (n for n in dependence.above(indices) if n.op.startswith("call") and _new_sizes(n))
    return sum(
        called_name(node) == "item" or not any(map(_sizes, node.all_input_nodes))
        for node in searches
    )


def _new_sizes(node: fx.Node) -> set[object]:
    return _sizes(node).difference(*map(_sizes, node.all_input_nodes))


def _sizes(node: fx.Node) -> set[object]:
    """Return the symbols of sizes, or the number itself, that a node's value has."""
    leaves = pytree.tree_leaves(value_of(node))
    sizes = [s for t in leaves for s in (t.shape if isinstance(t, torch.Tensor) else [t])]
    return {
        symbol for s in sizes if isinstance(s, torch.SymInt) for symbol in s.node.expr.free_symbols
    }
