"""Have a value written once that several operators read slices of: each would copy its own.

Contract
    Requires  FUNCTIONAL.
    Keeps     every node; values to be written where they are made are marked for Inductor.

    rows = index(x, i); mm(rows[a:b], v); mm(rows[a:b], w)  ->  the same, with `rows` in memory

Inductor makes gathers and elementwise values within the kernels that read them. A slice of a value
not in memory is no view but a copy, and every operator that Inductor only calls gets its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
import torch.fx as fx

from moe_compile.cost.amounts import fuses_what_it_reads, is_free, is_fusible
from moe_compile.graph.precedence import is_view
from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass
from passes.quantize_where_made import is_made_in_blocks

ATEN: Final = torch.ops.aten
PARTS: Final = frozenset(
    {ATEN.slice.Tensor, ATEN.split_with_sizes.default, ATEN.split.Tensor, ATEN.select.int}
)
MARK: Final = "inductor_realize_to_strides"
"""Key with which Inductor's `decompose_mem_bound_mm` marks such values for its lowering."""


@dataclass(frozen=True)
class RealizeSlices(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "realize_slices"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    commutes_with: ClassVar[frozenset[str]] = frozenset({"copy_fills"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Mark every value that is read in slices, and by more than one reader."""
        del state
        chosen = [node for node in graph.nodes if is_fusible(node) and _is_read_in_slices(node)]
        for node in chosen:
            node.meta[MARK] = True
        return PassReport(pass_name=self.name, applied=tuple(node.name for node in chosen))


def _is_read_in_slices(node: fx.Node) -> bool:
    if len(node.users) == 1 and is_made_in_blocks(next(iter(node.users))):
        return False  # the slice is written once as well
    readers = list(_readers(node, is_slice=False))
    copies = (is_slice and not fuses_what_it_reads(one) for one, is_slice in readers)
    return len(readers) > 1 and any(copies)


def _readers(node: fx.Node, *, is_slice: bool) -> Iterator[tuple[fx.Node, bool]]:
    """Yield readers of the node's memory, through views as well, and whether of a slice."""
    for user in node.users:
        if user.target is operator.getitem or is_view(user) or user.target is ATEN._unsafe_view:
            yield from _readers(user, is_slice=is_slice or user.target in PARTS)
        elif user.op == "output" or not is_free(user):
            yield user, is_slice
