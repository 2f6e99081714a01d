"""Inputs of a region that are constants: made by factories, never written.

Contract
    A node is constant only if no tensor that shares its memory is written anywhere in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.dependence import storages
from moe_compile.graph.effects import may_draw
from moe_compile.graph.query import argument_of, is_launch, tensor_of
from moe_compile.regions.regions import MoERegion

CONCATENATIONS: Final = (torch.cat, torch.concat, torch.concatenate)


def constant_nodes(region: MoERegion) -> list[fx.Node]:
    """Return the inputs of `region` made of constants alone, and the nodes that make them."""
    graph = region.result.graph
    needed = _above(_constants(region), region.others)
    return [node for node in graph.nodes if node in needed]


def constants_behind(node: fx.Node, region: MoERegion) -> int:
    """Return the number of constant entries that `node` puts behind one tensor along dim 0."""
    if node.target not in CONCATENATIONS or argument_of(node, 1, "dim", 0) != 0:
        return 0
    parts = argument_of(node, 0, "tensors")
    if len(parts) != 2 or storages(node) & region.facts.dependence.written:
        return 0
    behind = tensor_of(parts[1]) if parts[1] in _constants(region) else None
    size = behind.shape[0] if behind is not None and behind.dim() else 0
    return size if isinstance(size, int) else 0


def _constants(region: MoERegion) -> set[fx.Node]:
    constant, written = set[fx.Node](), region.facts.dependence.written
    for node in region.result.graph.nodes:
        tensor = tensor_of(node)
        if tensor is None or not _is_call(node) or storages(node) & written:
            continue
        if all(i in constant for i in node.all_input_nodes):
            constant.add(node)
    return constant


def _is_call(node: fx.Node) -> bool:
    """Whether the node is a call that gives the same each time; custom operators may not."""
    is_call = node.op in ("call_function", "call_method") and not is_launch(node)
    return is_call and not may_draw(node)


def _above(constant: set[fx.Node], starts: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [node for node in starts if node in constant]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found
