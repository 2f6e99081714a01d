"""Layers of a Dynamo graph: stretches that are traced, priced and decided on by themselves.

Contract
    Every region has its exchanges, its body, and its sums that are one operator, within one layer.
    A layer ends with a MoE region, or with an attention region that another one follows; nodes
    behind the last layer are in none.
    Equal layers of a model are equal programs: their text, and so their work, is the same.

Pseudo-code
    behind each region that ends a layer, before the next region begins:
        cut where the fewest values are needed on both sides, the earliest of such places;
        between blocks of a transformer that is behind the residual sum: one tensor
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch.fx as fx

from moe_compile.attention.attention_regions import AttentionRegion
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.regions.fused_sums import FusedSums
from moe_compile.regions.regions import MoERegion, Region


class Layers:
    """The layers of one graph, by the regions in them; each is traced when first read."""

    def __init__(
        self,
        graph: fx.Graph,
        regions: Iterable[Region],
        *,
        is_recomputed: bool = False,
        sums: Iterable[FusedSums] = (),
    ) -> None:
        """Cut `graph` between its `regions`; `is_recomputed` and `sums` as of `TracedNodes`."""
        nodes, found, fused = list(graph.nodes), tuple(regions), tuple(sums)
        self._place = {node: place for place, node in enumerate(nodes)}
        self._behind = {form.result: self._place[form.sums.total] for form in fused}
        cuts = [0, *self._cuts(nodes, found)]
        self._layers = {
            end: TracedNodes(
                graph, frozenset(nodes[start:end]), is_recomputed=is_recomputed, sums=fused
            )
            for start, end in itertools.pairwise(cuts)
        }

    def around(self, region: Region) -> TracedNodes:
        """Return the layer that `region` is in."""
        last = self._place[region.result]
        return next(layer for end, layer in self._layers.items() if last < end)

    def _cuts(self, nodes: Sequence[fx.Node], regions: Sequence[Region]) -> Iterator[int]:
        """Yield how many nodes stand before each cut."""
        spans = sorted(map(self._span, regions))
        crossing = self._crossing(nodes)
        for last, _, is_attention in spans:
            if any(start <= last < end for end, start, _ in spans):
                continue
            after = [(start, kind) for _, start, kind in spans if start > last]
            end, is_next_attention = min(after, default=(len(nodes) - 1, True))
            if is_attention and not is_next_attention:
                continue
            yield 1 + min(range(last, max(end, last + 1)), key=crossing.__getitem__)

    def _span(self, region: Region) -> tuple[int, int, bool]:
        """Return where a region ends and begins, and whether it is one of attention."""
        begins = (region.count_exchange,) if isinstance(region, MoERegion) else ()
        first = min(map(self._place.__getitem__, (*begins, *region.body)))
        last = self._behind.get(region.result, self._place[region.result])
        return last, first, isinstance(region, AttentionRegion)

    def _crossing(self, nodes: Sequence[fx.Node]) -> list[int]:
        """Return how many values are needed on both sides of the place behind each node.

        What the graph is given counts from its first use: a weight is needed within one layer.
        """
        change = [0] * (len(nodes) + 1)
        for node in nodes:
            uses = [self._place[user] for user in node.users]
            if uses:
                is_given = not node.op.startswith("call")
                change[min(uses) if is_given else self._place[node]] += 1
                change[max(uses)] -= 1
        return list(itertools.accumulate(change))
