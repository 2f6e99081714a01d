"""What of a region's body makes the rows sent back, once rows and counts are given.

Contract
    Nodes that only arrange the exchanges are no part of it: split sizes, launches, waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from moe_compile.graph.query import expression_of, tensor_of, value_of, waits_on
from moe_compile.regions.regions import MoERegion


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyNeeds:
    """The experts' own part of a region."""

    received: tuple[fx.Node, ...]
    """The dispatch and its waits: what the experts are given comes instead."""
    num_rows: tuple[fx.Node, ...]
    """Sizes that say how many rows were received in all."""
    nodes: tuple[fx.Node, ...]
    """What makes the rows sent back of received rows, their number and the counts, in order."""
    reads_host: bool
    """Whether the host reads integers for it, apart from `num_rows`."""
    reads_sent: bool
    """Whether it reads how many rows this rank sends."""


def needs_of_body(region: MoERegion) -> BodyNeeds:
    """Return what of `region` is needed to compute what its combine sends."""
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
