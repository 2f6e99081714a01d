"""Peak of live bytes of a graph, for any order of its nodes.

Contract
    Views share their base's storage and a wait its launch's; graph inputs are the caller's and
    do not count; what a launch sends lives until its wait; outputs live to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.alias_classes import AliasClasses
from moe_compile.graph.effects import is_size_query
from moe_compile.graph.precedence import awaited
from moe_compile.graph.query import is_wait, value_of


@dataclass(frozen=True, slots=True)
class Liveness:
    """What each node allocates and uses, by index of the node."""

    allocates: tuple[tuple[tuple[int, int], ...], ...]
    """(storage, bytes) of storages the node makes; several share its bytes evenly."""
    uses: tuple[tuple[int, ...], ...]
    """Storages that must be alive when the node runs."""

    @classmethod
    def of(cls, nodes: Sequence[fx.Node], sizes: NominalSizes) -> Liveness:
        """Read the nodes of a graph, in its order."""
        classes = AliasClasses(nodes)
        held = classes.of(*(n for n in nodes if n.op in ("placeholder", "get_attr")))
        made: set[int] = set()
        allocates: list[tuple[tuple[int, int], ...]] = []
        uses: list[tuple[int, ...]] = []
        for node in nodes:
            produced = classes.of(node) - held
            mine = produced - made
            made |= mine
            size = sizes.nbytes(value_of(node)) // max(1, len(produced))
            allocates.append(tuple((memory, size) for memory in sorted(mine)))
            needed = () if is_size_query(node) else (*node.all_input_nodes, *_sent(node))
            uses.append(tuple(sorted((classes.of(*needed) - held) | produced)))
        return cls(tuple(allocates), tuple(uses))

    def peak_bytes(self, order: Sequence[int]) -> int:
        """Return the largest sum of live bytes when nodes run in `order`."""
        last: dict[int, int] = {}
        for step, node in enumerate(order):
            for storage in self.uses[node]:
                last[storage] = step
        size: dict[int, int] = {}
        live = peak = 0
        for step, node in enumerate(order):
            for storage, nbytes in self.allocates[node]:
                size[storage] = nbytes
                live += nbytes
            peak = max(peak, live)
            for storage in self.uses[node]:
                if last[storage] == step:
                    live -= size.get(storage, 0)
        return peak


def _sent(node: fx.Node) -> tuple[fx.Node, ...]:
    launch = awaited(node) if is_wait(node) else None
    return tuple(launch.all_input_nodes) if launch is not None else ()
