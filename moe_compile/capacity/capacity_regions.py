"""A region of experts with a capacity, with facts for the passes.

Contract
    A region names nodes of one graph and is stale once that graph is edited.
    Every value of its body has the index of local experts in one dimension, or belongs to one of
    them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.fx as fx

from moe_compile.dims.factors import Factor
from moe_compile.dims.tracker import Tracker


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityRegion:
    """An even exchange to experts, the experts, and the even exchange back."""

    name: str
    """`region 0`, `region 1`, ... after those whose splits come from counts."""
    rows: fx.Node
    """The rows sent: the slots of all experts of all ranks."""
    dispatch: fx.Node
    combine: fx.Node
    result: fx.Node
    """The last wait of the combine."""
    body: tuple[fx.Node, ...]
    """Nodes from dispatch to result, both included, in graph order."""
    cut: tuple[fx.Node, ...]
    """Inputs of the body that have the index of experts: a chunk reads its part."""
    tracker: Tracker
    experts: Factor
    """The factor that is the index of local experts."""
    expert_of: Mapping[fx.Node, int] = field(hash=False)
    """Node of the body that works for one local expert alone -> that expert."""
    group: str
    num_ranks: int

    @property
    def num_local_experts(self) -> int:
        """Return the number of experts of this rank."""
        return self.experts.size

    @property
    def launches(self) -> tuple[fx.Node, ...]:
        """Both exchanges."""
        return (self.dispatch, self.combine)
