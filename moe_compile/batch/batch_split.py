"""The split of a graph that may run on parts of its batch, as passes read it.

Contract
    A split names nodes of one graph and is stale once that graph is edited.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch.fx as fx

from moe_compile.dims.factors import Dims, Factor, flat, holds
from moe_compile.dims.tracker import Tracker
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.token_regions import TokenPart, TokenRows


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShare:
    """The part of the tokens that this rank routes."""

    ranks: tuple[int, ...]
    """Ranks that divide the tokens among them, in order."""
    number: int
    """Number of this rank's share among the equal shares, from 0."""
    factor: Factor
    """The factor that is the index of the tokens in the share."""
    rows_per_token: int
    slices: frozenset[fx.Node]
    """Nodes that take the share's rows of a tensor that has a row for each of all tokens."""
    shifted: Mapping[fx.Node, fx.Node]
    """The order of the rows counted from the first of all tokens -> from the first of the share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRegion:
    """A MoE region of the graph, whose results are those of tokens apart."""

    region: MoERegion
    found: TokenRows
    share: TokenShare | None
    """The share of tokens, where ranks divide them; None where the region has rows of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSplit:
    """The nodes that run once for each part, and the treatment of the others."""

    batch: Factor
    """The factor that is the index of the batch: of sequences, or of other values apart."""
    tracker: Tracker
    """The factors of every value that has that index in a dimension."""
    regions: tuple[SplitRegion, ...]
    rows: tuple[Factor, ...]
    """Outer factors of values in the order of rows: a part has its share of these too."""
    cut: tuple[fx.Node, ...]
    """Values with the index that parts read and do not make: each part reads its share."""
    anew: tuple[fx.Node, ...]
    """Zeros, ones and numbers of places that have the index: each part makes its own."""
    spread: frozenset[fx.Node]
    """Nodes that repeat parameters for every index: each part makes its own."""
    written: tuple[fx.Node, ...]
    """Those that are written in place: parts write memory of their own."""
    segments: tuple[tuple[fx.Node, ...], ...]
    """Nodes that run for each part, in graph order, cut where segments of other parts may run."""
    alone: tuple[fx.Node, ...]
    """Values with a gradient that a part reads more than once, or within a region: each part reads
    them by names of its own, and adds up its own terms."""
    results: tuple[fx.Node, ...]
    """Outputs of the graph that are made of parts, joined."""
    summed: tuple[fx.Node, ...]
    """Counts, sums and means over the batch that are added up over parts, in graph order."""
    kept: tuple[fx.Node, ...]
    """Nodes from these to outputs of the graph, run once."""
    told: tuple[fx.Node, ...]
    """Nodes that read only sizes of nodes that depend on the batch."""
    dead: tuple[fx.Node, ...]
    """Nodes that depend on the batch, `told` included, and are not needed once parts run, in graph
    order."""

    @property
    def size(self) -> int:
        """Return the number of indices of the batch."""
        return self.batch.size

    def sizes(self, dims: Dims, share: int) -> list[int]:
        """Return the sizes of dimensions in a part that has `share` of the batch."""
        return [math.prod(self._size(factor, share) for factor in flat(dim)) for dim in dims]

    def is_divided(self, node: fx.Node) -> bool:
        """Whether a part has only a share of some dimension of `node`."""
        dims = self.tracker.dims(node) if node in self.tracker else []
        return any(holds(dim, factor) for dim in dims for factor in (self.batch, *self.rows))

    def takes(self, node: fx.Node, own: TokenShare) -> bool:
        """Whether `node` was followed to the tokens of a share."""
        return node in self.tracker and flat(self.tracker.dims(node)[0]) == flat([own.factor])

    def tokens_of(self, own: TokenShare | None, share: int) -> TokenPart | None:
        """Return the tokens with rows in a part that has `share` of the batch; None for all."""
        if own is None:
            return None
        (num_tokens,) = self.sizes([[own.factor]], share)
        first = own.number * num_tokens
        return TokenPart(first=first, rows_per_token=own.rows_per_token)

    def _size(self, factor: Factor, share: int) -> int:
        divided = factor is self.batch or factor in self.rows
        return factor.size // self.size * share if divided else factor.size
