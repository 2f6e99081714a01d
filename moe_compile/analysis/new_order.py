"""What runs in another order in a region's new form than in the region, and writes that tell.

Contract
    The new form makes first what the host reads depend on, then what else is computed from counts,
    then what is computed from rows; each part in the order of the graph. Integers that the region
    brings to the host are read where they came from, with all others.
"""

from __future__ import annotations

import torch.fx as fx

from moe_compile.analysis.host_reads import is_host_read, is_move_to_host
from moe_compile.analysis.regions import MoERegion
from moe_compile.graph.dependence import Dependence, storages


def find_overtaken(region: MoERegion, dependence: Dependence) -> tuple[fx.Node, fx.Node] | None:
    """Return a write of the region, and what reads the same memory before and would do so after."""
    counted, place = set(region.count_side), dependence.position
    given = {region.rows, region.counts, region.received_counts, *region.others}
    reads = [node for node in region.count_side if is_host_read(node)]
    first = dependence.above(reads, stops=given) & counted

    def part(node: fx.Node) -> int:
        return 0 if node in first else 1 if node in counted else 2

    body = set(region.body)
    for writer, written in dependence.writes.items():
        for node in region.body if writer in body else ():
            late = part(node) > part(writer) or is_move_to_host(node)
            touched = not written or (dependence.reads(node) | storages(node)) & written
            if late and touched and place[node] < place[writer]:
                return writer, node
    return None
