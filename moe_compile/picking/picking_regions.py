"""A region of experts that pick rows of gathered tokens: what the passes know of it.

Contract
    A region names nodes of one graph and is stale once that graph is edited.
    Of every expert, row i of what it adds to the sums is made of row i of what it picks, of entry i
    of what it reads by row, and of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.fx as fx

from moe_compile.picking.row_sums import Put


@dataclass(frozen=True, kw_only=True, slots=True)
class Picked:
    """The rows of one expert: picked from the tokens of all ranks, added to the sums of all."""

    index: fx.Node
    """The token of each row, `[rows]`, or a mask of tokens; as many rows as a search or the host
    finds."""
    indices: tuple[fx.Node, ...]
    """The index, and its like where the same is computed again."""
    picks: tuple[fx.Node, ...]
    """What takes these rows of the tokens."""
    body: tuple[fx.Node, ...]
    """What is made of them, in graph order, the picks included."""
    put: Put
    """What adds the result to the sums, by the same index."""
    by_row: tuple[fx.Node, ...]
    """What the body reads from outside that has one entry per row, along dimension 0."""
    offsets: tuple[fx.Node, ...]
    """Of grouped products of the body: where the rows of each group end."""
    weights: tuple[fx.Node, ...]
    """What else it reads from outside that has a gradient."""

    row_dims: Mapping[fx.Node, int]
    """Tensor of the body -> its dimension of rows."""

    @property
    def moved(self) -> tuple[fx.Node, ...]:
        """Return what runs slice by slice."""
        return (*self.body, *self.put.nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class PickingRegion:
    """An all-gather of tokens, experts that pick theirs, and a reduce-scatter of the sums.

    Shapes: `tokens` `[T, D]` on each of W ranks, `everyone` `[W T, D]`, the sums as many rows.
    """

    name: str
    """`region 0`, `region 1`, ... after all others of experts."""
    tokens: fx.Node
    gather: fx.Node
    everyone: fx.Node
    """The last wait of the gather."""
    zeros: fx.Node
    """What the sums begin with."""
    experts: tuple[Picked, ...]
    """In the order in which their rows are added."""
    tail: tuple[fx.Node, ...]
    """What changes the sums number by number before they are reduced, in graph order."""
    reduce: fx.Node
    result: fx.Node
    """The last wait of the reduce-scatter."""
    is_alone: bool
    """Whether nothing but the experts reads the gathered tokens: then they are gathered in slices
    too."""
    behind_routing: fx.Node
    """Before this node all slices but the first may be gathered: behind what tells the experts of
    tokens, if that is gathered after them."""
    num_host_reads: int
    """Times the host waits to know how many rows there are, as the model is written."""
    num_reads_in_slices: int
    """The same where it runs in slices, how many rows each of them has included."""
    dead: tuple[fx.Node, ...]
    """What nothing needs once the region is written anew, in graph order."""
    group: str
    num_ranks: int
    num_tokens: int
    """T: the same on every rank, as the gather has it."""

    @property
    def num_local_experts(self) -> int:
        """Return how many experts this rank has."""
        return len(self.experts)
