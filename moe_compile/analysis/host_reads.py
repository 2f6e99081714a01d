"""How often the host waits for integers of a region."""

from __future__ import annotations

import torch.fx as fx

from moe_compile.analysis.regions import MoERegion


def count_host_reads(region: MoERegion) -> int:
    """Return the blocking copies to the host in one forward pass of `region` as written.

    Values read one by one from a tensor that was brought to the host whole cost one copy.
    """
    sources: set[object] = set()
    for node in region.count_side:
        if node.op == "call_method" and node.target == "item":
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
