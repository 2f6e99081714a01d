"""A graph that may run on parts of its batch: what the passes know of it.

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
    """Those that share the tokens out, in order."""
    number: int
    """Which of the equal shares, counted from 0."""
    factor: Factor
    """The index of the tokens in it."""
    rows_per_token: int
    slices: frozenset[fx.Node]
    """What takes rows of the share, of a tensor that has one for each of all tokens."""
    shifted: Mapping[fx.Node, fx.Node]
    """The order of the rows counted from the first of all tokens -> from the first of the share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRegion:
    """A MoE region inside of it, whose results are those of tokens apart."""

    region: MoERegion
    found: TokenRows
    share: TokenShare | None
    """Of the tokens, where ranks share these out; None where it has the rows of all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSplit:
    """What runs once for each part."""

    batch: Factor
    """The factor that is the index of the batch: of sequences, or of whatever comes apart."""
    tracker: Tracker
    """Of every value that has that index in a dimension."""
    regions: tuple[SplitRegion, ...]
    rows: tuple[Factor, ...]
    """Outer factors of what is in the order of rows: a part has its share of these too."""
    cut: tuple[fx.Node, ...]
    """What parts read and do not make, and has the index: each part reads its share."""
    anew: tuple[fx.Node, ...]
    """Zeros, ones and numbers of places that have the index: each part makes its own."""
    spread: frozenset[fx.Node]
    """What repeats parameters for every index: each part makes its own."""
    written: tuple[fx.Node, ...]
    """What of these is written in place: parts do so in memory of their own."""
    segments: tuple[tuple[fx.Node, ...], ...]
    """What runs for each part, in graph order, cut where segments of other parts may run."""
    alone: tuple[fx.Node, ...]
    """What has a gradient and is read by a part more than once, or within a region: each part reads
    it by a name of its own, and adds up its own terms."""
    results: tuple[fx.Node, ...]
    """Outputs of the graph that are made of parts, joined."""
    summed: tuple[fx.Node, ...]
    """Counts, sums and means over the batch that are added up over parts, in graph order."""
    kept: tuple[fx.Node, ...]
    """What outputs of the graph are computed by from these, once."""
    told: tuple[fx.Node, ...]
    """What reads sizes of what depends on the batch, and nothing else of it."""
    dead: tuple[fx.Node, ...]
    """What depends on the batch, `told` included, and is not needed once parts run, in graph
    order."""

    @property
    def size(self) -> int:
        """Return how many indices the batch has."""
        return self.batch.size

    def sizes(self, dims: Dims, share: int) -> list[int]:
        """Return the sizes of dimensions in a part that has `share` of the batch."""
        return [math.prod(self._size(factor, share) for factor in flat(dim)) for dim in dims]

    def is_divided(self, node: fx.Node) -> bool:
        """Whether a dimension of `node` has a part's share of what it has of the whole."""
        dims = self.tracker.dims(node) if node in self.tracker else []
        return any(holds(dim, factor) for dim in dims for factor in (self.batch, *self.rows))

    def takes(self, node: fx.Node, own: TokenShare) -> bool:
        """Whether `node` was followed to the tokens of a share."""
        return node in self.tracker and flat(self.tracker.dims(node)[0]) == flat([own.factor])

    def tokens_of(self, own: TokenShare | None, share: int) -> TokenPart | None:
        """Return which tokens have rows in a part that has `share` of the batch; None for all."""
        if own is None:
            return None
        (num_tokens,) = self.sizes([[own.factor]], share)
        first = own.number * num_tokens
        return TokenPart(first=first, rows_per_token=own.rows_per_token)

    def _size(self, factor: Factor, share: int) -> int:
        divided = factor is self.batch or factor in self.rows
        return factor.size // self.size * share if divided else factor.size
