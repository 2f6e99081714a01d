"""Data of the other dispatches: the gather and the sums around a region, and its new forms.

Contract
    A `TokenRows` names nodes of one graph and is stale once that graph is edited.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from moe_compile.regions.body_nodes import BodyNeeds
from moe_compile.regions.regions import MoERegion
from moe_compile.runtime.node_groups import NodeGroups


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSum:
    """The sums after a combine."""

    rows: fx.Node
    """`[R, D]`: the rows that are summed."""
    total: fx.Node
    """`[T, D]`: one sum per token."""
    index: fx.Node
    """`[R]`: the token of each row; where rows are put in order first, the order."""
    is_order: bool
    """Whether `index` is the order of the rows, `k` to a token, instead of their tokens."""
    num_sums: object
    """T, as `shape_of` has it; where rows are put in order first, as their order tells it."""
    num_slots: object = None
    """Number of rows added up for a token, where rows are put in order first; else None."""
    base: fx.Node | None = None
    """The tensor that the sums are added to; None for zeros."""
    weights: fx.Node | None = None
    """Weights of the rows in order, `k` to a token; None for 1."""
    tail: tuple[fx.Node, ...]
    """All nodes of the form, from the rows on, `total` included, in order."""
    memory: fx.Node | None = None
    """The memory that rows are written into in order; None where they are indexed."""
    by_token: fx.Node | None = None
    """The rows in order as `[T, k, D]`."""
    needs_all: bool = False
    """Whether the form has a row for every place, so that no unfilled memory is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPart:
    """Consecutive tokens whose rows a rank sends; other ranks send the rows of the others.

    This is so where ranks of tensor parallelism have the same tokens and divide their routing.
    """

    first: int | fx.Node
    """The number of its first token."""
    rows_per_token: int
    """Rows of every token of the part; the others have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRows:
    """The gather before a region's dispatch and the sum after its combine.

    Shapes: `tokens` `[T, D]`, `index` `[R]`, each factor `[R, 1]`.
    """

    tokens: fx.Node
    index: fx.Node
    gather: fx.Node
    before: tuple[fx.Node, ...]
    """Nodes that change the gathered rows before they are sent, in order."""
    after: tuple[fx.Node, ...]
    """Nodes that change the rows that came back before they are summed, in order."""
    factors: tuple[fx.Node, ...]
    """Factors per row that `before` and `after` read, each once."""
    sums: TokenSum
    rows_per_token: int | None
    """Rows that every token, or every token of `part`, has; None when not proven to be one
    number."""
    part: TokenPart | None = None
    """The tokens that have rows, where not all are proven to."""
    mean_rows_per_token: int | None
    """Rows of a rank over its tokens where that is proven to be one number in every step and on
    every rank, whichever tokens the rows are of; else None."""
    is_chosen_once: bool
    """Whether no token is proven to have two rows for one expert."""
    chosen: fx.Node | None
    """The experts of each token, `[..., k]`, by which the rows are sorted; with a `part`, of its
    tokens. None when not found."""
    keeps_order: bool
    """Whether the rows of one expert stand in the order of their tokens."""

    @property
    def weighted(self) -> frozenset[str]:
        """Those of `dispatch` and `combine` around which rows are changed before they are packed.

        For the combine, gradients of sums become gradients of weighted rows.
        """
        is_weighted = bool(self.after) or self.sums.weights is not None
        changed = {"dispatch": bool(self.before), "combine": is_weighted}
        return frozenset(name for name, is_changed in changed.items() if is_changed)

    def readers(self, factor: fx.Node) -> frozenset[fx.Node]:
        """Return which of `before` and `after` read the factor."""
        chain = (*self.before, *self.after)
        return frozenset(node for node in chain if factor in node.all_input_nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredForm:
    """The form of a region that runs on gathered tokens."""

    region: MoERegion
    found: TokenRows
    needs: BodyNeeds
    num_slices: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EvenForm:
    """The form of a region whose rows travel in equal parts: the host reads nothing of it."""

    region: MoERegion
    needs: BodyNeeds
    room: int
    """Rows that one rank may send to one rank."""
    num_chunks: int = 1

    @property
    def slice_room(self) -> int:
        """Return the rows that one rank may send to one rank in a chunk.

        A chunk's share of n rows of an expert is at most `(n + chunks - 1) / chunks`: of all
        experts' shares as many fit as of the rows.
        """
        rounded = self.region.num_local_experts * (self.num_chunks - 1)
        return (self.room + rounded) // self.num_chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoHopForm:
    """The form of a region that is dispatched in two hops."""

    region: MoERegion
    found: TokenRows
    chosen: fx.Node
    """The experts of each token, `[..., k]`, none of them twice."""
    told: tuple[fx.Node, ...]
    """Nodes from the exchange of counts to the received counts, in graph order, that the table of
    the hops replaces. () where the model's own exchange stays."""
    nodes: NodeGroups
    rounds: bool
    """Whether sums per token are made on the nodes, so that all exchanges go in two hops."""
    dispatch_wire: str = "same"
    combine_wire: str = "same"
    """Number format its rows travel in, as the options name it."""
