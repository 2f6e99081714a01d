"""Memory that a program makes for one operator to write, and that nothing else writes.

Contract
    A fill is found only where reading what the collective brought, in place of the memory, is the
    same: nothing reads the memory before, the two have one type, sizes and strides, nothing writes
    either after, nothing else reads what was brought, and gradients flow alike.
    A write by index is found only where nothing else writes the memory or reads it before.

`dist.all_to_all_single(out, x)` is traced as a functional exchange, its wait, and `out.copy_(...)`.
`out.index_add_(0, i, rows)` is what `out = out.index_add(0, i, rows)` is, where `out` is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.dependence import Dependence, storages
from moe_compile.graph.edit import Emitter, erase_dead, read_instead, replace_uses
from moe_compile.graph.modes import Mode, modes
from moe_compile.graph.query import called_name, is_wait, tensor_of
from passes.normalize.body_values import MAKE_MEMORY, alike

ELSEWHERE: Final = {
    "index_add_": "index_add",
    "index_copy_": "index_copy",
    "scatter_add_": "scatter_add",
}
"""Methods that write memory by an index, and those that write a copy of it."""


@dataclass(frozen=True, slots=True)
class Fill:
    """`copy` fills `memory` with `source`, what a collective brought or a part of that."""

    memory: fx.Node
    copy: fx.Node
    source: fx.Node


def find_fills(graph: fx.Graph) -> list[Fill]:
    """Return the fills after which memory may be read where its source is."""
    copies = (n for n in graph.nodes if n.op == "call_method" and n.target == "copy_")
    fills = [fill for copy in copies if (fill := _fill(copy)) is not None]
    if not fills:
        return []
    dependence, mode_of = Dependence(graph), modes(graph)
    return [fill for fill in fills if _is_only_read(fill, dependence, mode_of)]


def _fill(copy: fx.Node) -> Fill | None:
    memory, source = copy.args[:2]
    if not isinstance(memory, fx.Node) or not isinstance(source, fx.Node):
        return None
    if not _is_new(memory) or not _is_brought(source) or not alike(memory, source):
        return None
    return Fill(memory, copy, source)


def _is_new(memory: object) -> bool:
    """Whether the node makes memory of its own, to which no gradient flows."""
    if not isinstance(memory, fx.Node) or called_name(memory) not in MAKE_MEMORY:
        return False
    return not memory.kwargs.get("requires_grad")


def _is_brought(node: fx.Node) -> bool:
    """Whether a collective brought it, whole or in parts, and one reader has it alone."""
    while called_name(node) == "getitem" and len(node.users) == 1:
        (node,) = node.all_input_nodes
        if is_wait(node):
            return all(called_name(user) == "getitem" for user in node.users)
    return is_wait(node) and len(node.users) == 1


def _is_only_read(fill: Fill, dependence: Dependence, mode_of: Mapping[fx.Node, Mode]) -> bool:
    place = dependence.position
    if any(place[user] < place[fill.copy] for user in fill.memory.users):
        return False
    tensor = tensor_of(fill.source)
    flows = tensor is not None and tensor.requires_grad
    if flows and mode_of[fill.copy][0] is not mode_of[fill.source][0]:
        return False
    memory = storages(fill.memory) | storages(fill.source)
    return not any(
        not written or written & memory
        for writer, written in dependence.writes.items()
        if writer is not fill.copy and place[writer] > place[fill.source]
    )


def read_sources(fills: list[Fill]) -> None:
    """Have readers of filled memory read what it is filled with."""
    for fill in fills:
        replace_uses({fill.copy: fill.source})
        for reader in [user for user in fill.memory.users if user is not fill.copy]:
            read_instead(reader, fill.memory, fill.source)
        erase_dead([fill.memory, fill.copy])


def write_elsewhere(graph: fx.Graph) -> list[fx.Node]:
    """Have writes by index into new memory write a copy, and what reads the memory read that."""
    writes = [n for n in graph.nodes if n.op == "call_method" and n.target in ELSEWHERE]
    writes = [write for write in writes if _is_new(write.args[0])]
    dependence = Dependence(graph) if writes else None
    found = [write for write in writes if dependence is not None and _is_alone(write, dependence)]
    for write in found:
        memory, value = write.args[0], tensor_of(write)
        assert isinstance(memory, fx.Node) and value is not None
        total = Emitter(write).method(ELSEWHERE[str(write.target)], *write.args, **write.kwargs)
        total.meta["example_value"] = torch.empty_like(value).requires_grad_(value.requires_grad)
        for reader in [user for user in memory.users if user not in (write, total)]:
            read_instead(reader, memory, total)
        replace_uses({write: total})
        erase_dead([write])
    return found


def _is_alone(write: fx.Node, dependence: Dependence) -> bool:
    """Whether nothing but `write` writes its memory, and nothing reads that before."""
    memory, place = write.all_input_nodes[0], dependence.position
    is_first = all(place[user] >= place[write] for user in memory.users)
    reads_it = memory in (*write.args[1:], *write.kwargs.values())
    return is_first and not reads_it and dependence.writers(memory) == [write]
