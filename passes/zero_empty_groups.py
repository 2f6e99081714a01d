"""Write zeros where a GPU may leave gradients of the weights of a group without rows unwritten.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value of a group with rows. The gradient of a group without rows is zero, as a
              sum over no row; torch may leave stale memory there (`hardware/chip_limits.py`).

    _grouped_mm(a, b, offs)  ->  where(group has rows, _grouped_mm(a, b, offs), 0)

This concerns products of rows by rows, whose sum runs over the rows. On other GPUs nothing is
changed. An expert without a token has such a group in any program, and so have all experts of a
chunk without a row on this rank. Inductor computes the `where` in the sum over chunks.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
import torch.fx as fx
from torch._guards import detect_fake_mode

from moe_compile.graph.edit import ValuedEmitter, replace_uses
from moe_compile.graph.query import tensor_of
from moe_compile.hardware.chip_limits import leaves_empty_groups
from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass

ATEN: Final = torch.ops.aten
GROUPED: Final = ATEN._grouped_mm.default


@dataclass(frozen=True)
class ZeroEmptyGroups(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "zero_empty_groups"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    is_needed: ClassVar[bool] = True
    after: ClassVar[frozenset[str]] = frozenset({"compress_gradients"})  # it reads what made them

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Put zeros into the empty groups of every product of rows by rows."""
        del state
        products = graph.find_nodes(op="call_function", target=GROUPED)
        chosen = [product for product in products if _may_leave_groups(product)]
        for product in chosen:
            _zero_empty_groups(product)
        return PassReport(pass_name=self.name, applied=tuple(node.name for node in chosen))


def _may_leave_groups(product: fx.Node) -> bool:
    left, right = (tensor_of(argument) for argument in product.args[:2])
    assert left is not None and right is not None
    return left.dim() == right.dim() == 2 and leaves_empty_groups(left.device)


def _zero_empty_groups(product: fx.Node) -> None:
    """Read `product` by a `where` that has zeros for groups that end where they begin."""
    ends = product.kwargs["offs"] if "offs" in product.kwargs else product.args[2]
    value = product.meta["val"]
    emit = ValuedEmitter(product.next)
    with detect_fake_mode([value]) or contextlib.nullcontext():  # fake without tensors too
        zero = emit.call(ATEN.full.default, [], 0.0, dtype=value.dtype, device=value.device)
    begins = emit.call(ATEN.constant_pad_nd.default, ends, [1, -1], 0)
    has_rows = emit.call(ATEN.ne.Tensor, ends, begins)
    has_rows = emit.call(ATEN.view.default, has_rows, [-1, 1, 1])
    zeroed = emit.call(ATEN.where.self, has_rows, product, zero)
    replace_uses({product: zeroed})
