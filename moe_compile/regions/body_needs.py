"""The nodes of a region's body that compute the rows sent back from given rows and counts.

Contract
    Nodes that only arrange the exchanges are excluded: split sizes, launches, waits.
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
