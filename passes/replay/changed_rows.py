"""Change rows elsewhere as the model changes them at home: casts, factors, weights of sums.

Contract
    The operators are the model's own, or equal them element by element, so that values and
    gradients of the rows are those that the model computes for the same rows at home.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.torch_calls import torch_name
from moe_compile.regions.row_chain import CASTS
from moe_compile.regions.token_regions import TokenSum
from moe_compile.regions.token_sums import WEIGHS


def changed_rows(
    emit: Emitter,
    first: fx.Node,
    rows: fx.Node,
    chain: Iterable[fx.Node],
    factors: Mapping[fx.Node, fx.Node],
) -> fx.Node:
    """Emit `chain` on `rows`, in the place of `first` and with `factors` for the model's."""
    env: dict[fx.Node, Any] = {**factors, first: rows}
    for node in chain:
        rows = env[node] = emit.copy(node, env)
    return rows


def weights_of_rows(emit: Emitter, sums: TokenSum) -> fx.Node:
    """Emit the weights of a weighted sum, which stand by token, for each row: `[R, 1]`."""
    assert sums.weights is not None
    flat = emit.method("reshape", sums.weights, -1)
    return emit.method("unsqueeze", emit.call(operator.getitem, flat, sums.index), -1)


def weighted_rows(
    emit: Emitter, sums: TokenSum, rows: fx.Node, factors: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """Emit what a sum per token adds up, each row times its weight, in the types the model has.

    A batched product with weights `[T, 1, k]` gives a row the gradient `weight * gradient`: one
    product each, as an elementwise one with weights `[T, k, 1]`.
    """
    if sums.weights is None:
        return rows
    for node in sums.tail:
        if torch_name(node) in WEIGHS:
            rows = emit.call(torch.mul, rows, factors[sums.weights])
        elif node.op == "call_method" and node.target in CASTS:
            rows = emit.copy(node, {node.args[0]: rows})
    return rows
