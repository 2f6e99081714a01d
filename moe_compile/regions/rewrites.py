"""Planned rewrites of regions, and their effects on the graph around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.fx as fx

from moe_compile.journal.reasons import Left
from moe_compile.regions.regions import MoERegion, RowProof


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """The planned rewrite of a region: its body runs just before its result."""

    region: MoERegion
    proof: RowProof
    replaced: fx.Node
    """The node that the rewrite makes anew: the region's result, or a node computed from it."""
    also_replaced: tuple[fx.Node, ...] = ()
    """Other nodes it makes anew: tensors that come back beside the result."""
    before: tuple[fx.Node, ...] = ()
    """Nodes outside the body that run just before the region's result as well."""
    behind: tuple[fx.Node, ...] = ()
    """Nodes from the region's result to `replaced` that run just before `replaced`."""
    others: tuple[fx.Node, ...] = ()
    """Nodes that the rewrite needs no more, wherever they run."""
    at_result: bool = False
    """Whether all of the new form runs at the region's result, in the order of the program: host
    reads too. Otherwise the host reads where the region's last read stands, and all nodes computed
    from counts run before those computed from rows."""
    not_served: frozenset[fx.Node] = frozenset()
    """Host reads that must stay where they are if anybody else needs them."""

    read_once: tuple[tuple[fx.Node, frozenset[fx.Node]], ...] = ()
    """Tensors of which one read of the new form serves several nodes, each with these nodes."""
    enters_autocast: bool = False
    """Whether nodes that run under autocast do so in the new form as well."""
    sliced: tuple[fx.Node, ...] = ()
    """Grouped products whose weights are cut into pieces before either."""

    @property
    def rows(self) -> tuple[fx.Node, ...]:
        """All nodes on the rows that the rewrite replaces."""
        return (*self.region.row_side, *self.behind)

    @property
    def made_anew(self) -> tuple[fx.Node, ...]:
        """All nodes whose readers read something new."""
        return (self.replaced, *self.also_replaced)

    @property
    def inputs(self) -> frozenset[fx.Node]:
        """Nodes of the graph that the new form reads: those that the old one reads from outside."""
        region = self.region
        old = {*region.body, *self.before, *self.behind, *self.others}
        return frozenset({i for node in old for i in node.all_input_nodes} | region.inputs) - old


@dataclass(frozen=True, kw_only=True, slots=True)
class Effects:
    """The effects of rewriting one region: where the host reads for it, and the reads that stay."""

    read_at: fx.Node
    """The one read of everything the host must know stands before this node."""
    bulk: frozenset[fx.Node]
    """Host reads of the region that the one read makes: of integers that are never negative."""
    served: tuple[fx.Node, ...]
    """Host reads of the region that others need and that the one read serves, in graph order."""
    moved: tuple[fx.Node, ...]
    """Nodes that depend on these and must stand behind the one read, in graph order."""
    num_kept: int
    """Host reads of the region that stay where they are, because others need them earlier, or
    because the host must read something else first."""
    sizes: Mapping[fx.Node, fx.Node]
    """Size of rows inside the region that others ask for -> the host integer that it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Aftermath:
    """The effects on a graph of rewrites applied together."""

    effects: Mapping[str, Effects | Left]
    """The effects or the refusal, by the region's name."""
    dead: tuple[fx.Node, ...]
    """Nodes that nothing needs any more, in graph order."""
