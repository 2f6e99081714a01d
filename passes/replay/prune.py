"""Leave out of a chunk the work of experts that are not in it.

Contract
    Only nodes proven to have no rows in the chunk are left out, and only where every reader is
    left out too or concatenates: joining nothing changes no value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.fx as fx

from moe_compile.analysis.regions import MoERegion, RowProof


@dataclass(slots=True)
class Pruned:
    """What one chunk does without."""

    nodes: set[fx.Node] = field(default_factory=set)
    """Nodes of the region the chunk does not run."""
    dropped_from: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    """Concatenation -> the inputs it goes without."""
    inputs: dict[fx.Node, dict[fx.Node, fx.Node]] = field(default_factory=dict)
    """Node -> inputs it reads instead of the chunk's copies."""


def prune_other_experts(region: MoERegion, proof: RowProof, experts: range) -> Pruned:
    """Return what the chunk holding local `experts` can do without."""
    empty = {node for node, expert in proof.expert_rows if expert not in experts}
    for node in region.row_side:  # tuples of empty pieces
        if node.users and all(user in empty for user in node.users) and _reads_any(node, empty):
            empty.add(node)
    changed = True
    while changed:
        needed = {n for n in empty if not all(u in empty or _concatenates(u, n) for u in n.users)}
        changed = bool(needed)
        empty -= needed
    pruned = Pruned(nodes=empty)
    for node in region.row_side:
        if node not in empty and _is_cat(node) and (dropped := empty & set(node.all_input_nodes)):
            pruned.dropped_from[node] = dropped
    return pruned


def _reads_any(node: fx.Node, empty: set[fx.Node]) -> bool:
    return any(i in empty for i in node.all_input_nodes)


def _is_cat(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.cat


def _concatenates(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` joins `node` with others along the rows."""
    if not _is_cat(user) or not isinstance(user.args[0], list | tuple):
        return False
    dim = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim", 0)
    return dim == 0 and node in user.args[0]
