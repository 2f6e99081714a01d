"""Nodes of a region's body: those that compute the rows sent back, and those that read integers.

Contract
    Nodes that only arrange the exchanges are no needs of the body: split sizes, launches, waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from moe_compile.graph.query import expression_of, tensor_of, value_of, waits_on
from moe_compile.regions.regions import MoERegion


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyNeeds:
    """The experts' own part of a region."""

    received: tuple[fx.Node, ...]
    """The dispatch and its waits: the rows given to the experts replace them."""
    num_rows: tuple[fx.Node, ...]
    """Sizes that say how many rows were received in all."""
    nodes: tuple[fx.Node, ...]
    """Nodes that compute the rows sent back from received rows, their number and the counts."""
    reads_host: bool
    """Whether these nodes read integers on the host, apart from `num_rows`."""
    reads_sent: bool
    """Whether they read the number of rows that this rank sends."""


def needs_of_body(region: MoERegion) -> BodyNeeds:
    """Return the parts of `region` needed to compute the rows that its combine sends."""
    dependence = region.facts.dependence
    received = (region.dispatch, *waits_on(region.dispatch))
    rows = next((t for n in reversed(received) if (t := tensor_of(n)) is not None), None)
    total = None if rows is None else expression_of(rows.shape[0])
    num_rows = tuple(n for n in region.count_side if total is not None and _is_size(n, total))
    given = {*received, *num_rows, region.counts, region.received_counts, *region.others}
    sent = region.combine.all_input_nodes[0]
    writers = [n for n in dependence.needs(region.combine) if n in dependence.writes]
    needed = dependence.above([sent, *writers], stops=given)
    nodes = tuple(node for node in region.body if node in needed and node not in given)
    return BodyNeeds(
        received=received,
        num_rows=num_rows,
        nodes=nodes,
        reads_host=any(n.op == "call_method" and n.target == "item" for n in nodes),
        reads_sent=region.counts in needed,
    )


def _is_size(node: fx.Node, expression: object) -> bool:
    value = value_of(node)
    if value is None or isinstance(value, bool) or tensor_of(node) is not None:
        return False
    return bool(expression_of(value) == expression)


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
