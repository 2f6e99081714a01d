"""Reads of outside tensors by a region's rows: the experts that each gradient sums over.

Contract
    The gradient of a tensor read by rows of one expert alone is computed by one chunk, whole.
    Rows of several experts share a tensor only on request, and only a leaf that is an input: its
    gradient is a sum of the same terms in another order, and nothing is computed of it. With a
    unit roundoff of eps / 2 a sum of m products in any order is off by at most m eps / 2 of the
    sum of their magnitudes, to first order (Higham, section 3.1), and a chunk's share of it is
    rounded once more: whole and in chunks differ by at most (m + 1) eps times that. Where one
    chunk adds all m terms, in another order, they differ by at most m eps times that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.fx as fx

from moe_compile.graph.aliases import origin
from moe_compile.graph.query import is_leaf, operator_at, tensor_of
from moe_compile.journal.reasons import Left, Reason
from moe_compile.regions.row_domain import Outside


@dataclass(slots=True)
class Reads:
    """The expert whose rows read each slice of each differentiable tensor from outside.

    The gradient of a slice read by rows of one expert is computed by one chunk; the other chunks
    add zeros. Read by rows of several, it would be summed in another order.
    """

    may_share: bool = False
    """Whether rows of several experts may read a tensor whose gradient is a plain sum over them."""
    expert_of: dict[tuple[fx.Node, int | None], int] = field(default_factory=dict)
    shared: dict[fx.Node, None] = field(default_factory=dict)
    """Tensors that rows of several experts read."""

    def add(
        self, outside: Outside, index: int | None, expert: int | None, *, is_summed: bool = False
    ) -> None:
        """Note that rows of `expert` read slice `index` along dim 0, or all of it for None.

        `is_summed`: its gradient is a sum of terms, each computed of one row alone.
        """
        index = outside.part if index is None else index
        for node in sorted(set(map(origin, outside.nodes))):
            if not is_differentiable(node):
                continue
            if expert is not None and not self._conflicts(node, index, expert):
                self.expert_of[node, index] = expert
            elif not (is_summed and outside.is_given and _is_known_leaf(node)):
                raise Left(Reason.SHARED_PARAMETER, operator_at(node))
            elif not self.may_share:
                detail = (
                    f"{operator_at(node)}: megamoe.numerics = 'bounded' allows this change of order"
                )
                raise Left(Reason.SHARED_PARAMETER, detail)
            else:
                self.shared[node] = None

    def _conflicts(self, node: fx.Node, index: int | None, expert: int) -> bool:
        return any(
            n is node and (i is None or index is None or i == index) and e != expert
            for (n, i), e in self.expert_of.items()
        )


def _is_known_leaf(node: fx.Node) -> bool:
    """Whether a tensor is known to be a leaf: its gradient goes no further."""
    value = tensor_of(node)
    return node.op in ("placeholder", "get_attr") and value is not None and is_leaf(value)


def is_differentiable(node: fx.Node) -> bool:
    """Whether a tensor from outside has a gradient, or might: where no input says, any float."""
    value = tensor_of(node)
    if value is None or not (value.dtype.is_floating_point or value.dtype.is_complex):
        return False
    inputs = [tensor_of(n) for n in node.graph.nodes if n.op == "placeholder"]
    return value.requires_grad or not any(t is not None and t.requires_grad for t in inputs)
