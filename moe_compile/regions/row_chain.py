"""Steps that change rows one by one: casts, and products with one factor per row.

Contract
    A chain may be run on any rows, in any order, with the factors of those rows.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.effects import hands_on
from moe_compile.graph.memory import tensors_in
from moe_compile.graph.query import expression_of, operator_at, tensor_of, value_of
from moe_compile.journal.reasons import Left, Reason

CASTS: Final = frozenset(
    {"to", "type", "type_as", "float", "bfloat16", "half", "double", "contiguous"}
)
PRODUCTS: Final = (operator.mul, torch.mul, "mul")


@dataclass(slots=True)
class RowChain:
    """Nodes that change rows one by one, and the factors they read."""

    nodes: list[fx.Node] = field(default_factory=list)
    factors: list[fx.Node] = field(default_factory=list)

    def add(self, node: fx.Node, otherwise: Reason) -> fx.Node:
        """Add a step; return the rows it reads. Raise Left, with reason `otherwise` if unknown."""
        row, factors = _row_and_factors(node, otherwise)
        self.nodes.append(node)
        self.factors += factors
        return row


def only_reader(node: fx.Node) -> fx.Node:
    """Return the one node that reads `node`; raise Left where there are more or none."""
    if len(node.users) != 1:
        raise Left(Reason.ROWS_READ, operator_at(node))
    return next(iter(node.users))


def shape_of(node: object) -> list[object]:
    """Return the sizes of a tensor, numbers or expressions; [] of anything else."""
    tensor = tensor_of(node) if isinstance(node, fx.Node) else None
    return [] if tensor is None else [expression_of(size) for size in tensor.shape]


def num_rows(node: object) -> object:
    """Return the first size of a tensor, None of anything else."""
    return next(iter(shape_of(node)), None)


def type_of(node: object) -> torch.dtype | None:
    """Return the type of a tensor's numbers, None of anything else."""
    tensor = tensor_of(node) if isinstance(node, fx.Node) else None
    return None if tensor is None else tensor.dtype


def holds_fractions(node: fx.Node) -> bool:
    """Whether the value is a tensor of floating-point numbers, or holds one, as rows are."""
    return any(tensor.is_floating_point() for tensor in tensors_in(value_of(node)))


def _row_and_factors(node: fx.Node, otherwise: Reason) -> tuple[fx.Node, list[fx.Node]]:
    inputs = node.all_input_nodes
    is_cast = node.op == "call_method" and node.target in CASTS
    if (is_cast or hands_on(node)) and len(inputs) == 1:
        return inputs[0], []
    if node.target not in PRODUCTS or node.kwargs:
        raise Left(otherwise, operator_at(node))
    if len(inputs) == 1 and node.args[0] is not node.args[1]:
        return inputs[0], []  # one number for all rows
    is_factor = [shape_of(i)[1:] == [1] for i in inputs]
    if len(inputs) == 2 and sum(is_factor) == 1:
        return inputs[is_factor.index(False)], [inputs[is_factor.index(True)]]
    raise Left(Reason.NOT_BY_ROW, operator_at(node))
