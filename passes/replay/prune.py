"""Leave out of a chunk the work of experts that are not in it.

Contract
    Only nodes proven to have no rows in the chunk, or to write none, are left out, and only where
    every reader is left out too or joins rows: joining nothing changes no value. Nodes computed
    from counts for these nodes alone are left out as well.
    A concatenation that runs has an input.

Pseudo-code
    empty = nodes whose rows all belong to experts of other chunks,
            splits into such nodes, and joins of nothing else
    until nothing changes: keep nodes that a running node needs; a running join needs an input
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.effects import is_pure
from moe_compile.regions.body_nodes import is_host_read
from moe_compile.regions.regions import MoERegion, RowProof
from passes.replay.host_reads import Size

CONCATENATIONS: Final = (torch.cat, torch.concat, torch.concatenate)


@dataclass(slots=True)
class Pruned:
    """The nodes and inputs that one chunk leaves out."""

    nodes: set[fx.Node] = field(default_factory=set)
    """Nodes of the region the chunk does not run."""
    dropped_from: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    """Concatenation -> the inputs it leaves out."""
    inputs: dict[fx.Node, dict[fx.Node, fx.Node]] = field(default_factory=dict)
    """Node -> inputs it reads in place of the chunk's copies."""
    without_rows: dict[fx.Node, tuple[Size, Size]] = field(default_factory=dict)
    """Node of rows -> numbers of first and of last rows it is not given; their results are 0, and
    nothing depends on them."""


def prune_other_experts(region: MoERegion, proof: RowProof, experts: range) -> Pruned:
    """Return the nodes and inputs that the chunk with local `experts` can leave out."""
    joins = {node: pieces for node in proof.joins if (pieces := _pieces(node))}
    of_experts = (*proof.expert_rows, *proof.writes)
    empty = {node for node, expert in of_experts if expert not in experts}
    for node in region.row_side:
        reads_empty = any(i in empty for i in node.all_input_nodes)
        in_parts = bool(node.users) and all(user in empty for user in node.users) and reads_empty
        if in_parts or (node in joins and joins[node] <= empty):
            empty.add(node)
    while needed := [n for n in region.row_side if n in empty and _is_needed(n, joins, empty)]:
        empty.difference_update(needed)
    empty |= _only_for(empty, region.count_side)
    dropped = {n: pieces & empty for n, pieces in joins.items() if n not in empty}
    return Pruned(nodes=empty, dropped_from={n: gone for n, gone in dropped.items() if gone})


def _only_for(empty: set[fx.Node], count_side: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes computed from counts that only left-out nodes read."""
    unneeded = set(empty)
    for node in reversed([*count_side]):
        is_left = bool(node.users) and set(node.users) <= unneeded
        if is_left and is_pure(node) and not is_host_read(node):
            unneeded.add(node)
    return unneeded


def _pieces(node: fx.Node) -> set[fx.Node]:
    """Return the inputs of a concatenation, {} where it is not written as a list of nodes."""
    pieces: Iterable[object] = ()
    if node.target in CONCATENATIONS and node.args and isinstance(node.args[0], list | tuple):
        pieces = node.args[0]
    return {piece for piece in pieces if isinstance(piece, fx.Node)}


def _is_needed(node: fx.Node, joins: dict[fx.Node, set[fx.Node]], empty: set[fx.Node]) -> bool:
    """Whether a running node needs `node`: as more than one of several pieces to join."""
    running = [user for user in node.users if user not in empty]
    return any(node not in joins.get(user, ()) or joins[user] <= empty for user in running)
