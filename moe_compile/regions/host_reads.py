"""Host reads of a region's integers: the nodes that make them, and their number."""

from __future__ import annotations

import torch
import torch.fx as fx

from moe_compile.regions.regions import MoERegion


def is_host_read(node: fx.Node) -> bool:
    """Whether the host waits for one integer of a tensor."""
    return node.op == "call_method" and node.target == "item"


def is_move_to_host(node: fx.Node) -> bool:
    """Whether the node only copies integers to the host, as the bulk read does for all."""
    if node.op != "call_method" or node.target not in ("to", "cpu"):
        return False
    where = node.args[1] if len(node.args) > 1 else node.kwargs.get("device", "cpu")
    return len(node.args) <= 2 and isinstance(where, str | torch.device) and str(where) == "cpu"


def count_host_reads(region: MoERegion) -> int:
    """Return the blocking copies to the host in one forward pass of `region` as written.

    Values read one by one from a tensor that was brought to the host whole cost one copy.
    """
    sources: set[object] = set()
    for node in region.count_side:
        if is_host_read(node):
            element = node.args[0]
            tensor = element.args[0] if isinstance(element, fx.Node) and element.args else None
            sources.add(tensor if _is_on_host(tensor) else node)
    return len(sources)


def _is_on_host(tensor: object) -> bool:
    return (
        isinstance(tensor, fx.Node)
        and tensor.op == "call_method"
        and tensor.target in ("to", "cpu")
    )
