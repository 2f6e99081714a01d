"""Which rows read what of tensors from outside a region: whose gradient sums over which experts.

Contract
    The gradient of what rows of one expert alone read is computed by one chunk, whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.fx as fx

from moe_compile.graph.query import tensor_of
from moe_compile.graph.same_tensor import origin
from moe_compile.journal.reasons import Reason
from moe_compile.regions.row_domain import Outside, Unproven


@dataclass(slots=True)
class Reads:
    """Which expert's rows read which slice of each differentiable tensor from outside.

    The gradient of a slice read by rows of one expert is computed by one chunk; the other chunks
    add zeros. Read by rows of several, it would be summed in another order.
    """

    expert_of: dict[tuple[fx.Node, int | None], int] = field(default_factory=dict)

    def add(self, outside: Outside, index: int | None, expert: int | None) -> None:
        """Note that rows of `expert` read slice `index` along dim 0, or all of it for None."""
        index = outside.part if index is None else index
        for node in sorted(set(map(origin, outside.nodes))):
            if not is_differentiable(node):
                continue
            if expert is None or self._conflicts(node, index, expert):
                raise Unproven(Reason.SHARED_PARAMETER, node.name)
            self.expert_of[node, index] = expert

    def _conflicts(self, node: fx.Node, index: int | None, expert: int) -> bool:
        return any(
            n is node and (i is None or index is None or i == index) and e != expert
            for (n, i), e in self.expert_of.items()
        )


def is_differentiable(node: fx.Node) -> bool:
    """Whether a tensor from outside has a gradient, or might: where no input says, any float."""
    value = tensor_of(node)
    if value is None or not (value.dtype.is_floating_point or value.dtype.is_complex):
        return False
    inputs = [tensor_of(n) for n in node.graph.nodes if n.op == "placeholder"]
    return value.requires_grad or not any(t is not None and t.requires_grad for t in inputs)
