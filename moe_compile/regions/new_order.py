"""The order of nodes in a region's new form, and writes in place that would show the change.

Contract
    The new form first runs the nodes that host reads depend on and that need no host integer,
    then reads all integers that the host needs at once, then runs the other nodes computed from
    counts, then those computed from rows; each part in the order of the graph. Integers that the
    region copies to the host are read from their source, with all others.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

import torch
import torch.fx as fx

from moe_compile.graph import gradient_order
from moe_compile.graph.aliases import maker
from moe_compile.graph.dependence import storages
from moe_compile.graph.query import value_of
from moe_compile.regions.body_nodes import is_host_read, is_move_to_host
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.rewrites import Replacement


class Part(enum.IntEnum):
    """The parts of the new form, in their order."""

    BEFORE_THE_READ = 0
    THE_READ = 1
    FROM_COUNTS = 2
    FROM_ROWS = 3


def parts(region: MoERegion, bulk: Collection[fx.Node]) -> dict[fx.Node, Part]:
    """Return the part that each node of the region runs in, if one read makes the reads `bulk`.

    Reads that need an earlier host integer, by data or by a write in place, are not in that read.
    """
    counted, dependence = set(region.count_side), region.facts.dependence
    numbers = [n for n in region.count_side if is_host_read(n) or _is_number(n)]
    after = dependence.below(numbers)
    together = [n for n in bulk if after.isdisjoint(dependence.needs(n))]
    given = {*region.inputs, *region.others}
    first = (dependence.above(bulk, stops=given) & counted) - after

    def part(node: fx.Node) -> Part:
        if node not in counted:
            return Part.FROM_ROWS
        return Part.BEFORE_THE_READ if node in first else Part.FROM_COUNTS

    found = {node: part(node) for node in region.body}
    return {**found, **dict.fromkeys(together, Part.THE_READ)}


def order_of_gradients(
    rewrite: Replacement, bulk: Collection[fx.Node]
) -> gradient_order.Part | None:
    """Return the order in which the new form reads tensors that autograd adds gradients to.

    None unless counts come first. The readers are then: the dispatches of all chunks; slices of
    weights, one per chunk; nodes computed from counts; nodes computed from rows; the nodes of
    `between`.
    """
    if rewrite.at_result:
        return None
    region, part_of = rewrite.region, parts(rewrite.region, bulk)
    dispatches = {one.launch for one in region.dispatched}

    def part(reader: fx.Node, source: fx.Node) -> int:
        if reader in dispatches:
            return -2
        if reader in region.between:
            return Part.FROM_ROWS + 1
        weight = reader.args[1] if reader in rewrite.sliced else None
        if isinstance(weight, fx.Node) and maker(weight) is source:
            return -1
        return part_of.get(reader, Part.FROM_ROWS)

    return part


def _is_number(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.SymInt | torch.SymFloat | torch.SymBool)


def find_overtaken(region: MoERegion, bulk: Collection[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """Return a write of the region, and an earlier reader of its memory that would run later."""
    dependence, part = region.facts.dependence, parts(region, bulk)
    place = dependence.position
    for writer, written in dependence.writes.items():
        for node in region.body if writer in part else ():
            late = part[node] > part[writer] or is_move_to_host(node)
            touched = not written or (dependence.reads(node) | storages(node)) & written
            if late and touched and place[node] < place[writer]:
                return writer, node
    return None
