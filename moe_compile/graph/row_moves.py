"""Nodes of a graph of AOTAutograd that move whole rows: gathers, runs of rows, rows of zeros.

Contract
    A node is said to move rows only where its arguments prove it: a matrix, a one-dimensional
    index of integers, the first dimension.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.graph.query import expression_of, tensor_of

ATEN: Final = torch.ops.aten
SPLIT: Final = ATEN.split_with_sizes.default
SLICE: Final = ATEN.slice.Tensor
SHAPING: Final = (
    ATEN.expand.default,
    ATEN.view.default,
    ATEN.reshape.default,
    ATEN.unsqueeze.default,
)
FULL: Final = ATEN.full.default
ZEROS: Final = (ATEN.new_zeros.default, ATEN.zeros.default)


def row_gather(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (source, index) when `node` is `source[index]`, whole rows by an index of integers."""
    if node.target is ATEN.index.Tensor:
        source, indices = node.args
        assert isinstance(indices, list | tuple)
        index = indices[0] if all(other is None for other in indices[1:]) else None
    elif node.target is ATEN.index_select.default and node.args[1] == 0:
        source, index = node.args[0], node.args[2]
    elif node.target is ATEN.gather.default and node.args[1] == 0:
        source, index = node.args[0], _row_of_index(node.args[2], node.args[0])
    else:
        return None
    if not isinstance(index, fx.Node) or not isinstance(source, fx.Node):
        return None
    rows, positions = tensor_of(source), tensor_of(index)
    if rows is None or positions is None or rows.dim() != 2 or positions.dim() != 1:
        return None
    is_integer = positions.dtype in (torch.int64, torch.int32)
    return (source, index) if is_integer else None


def _row_of_index(index: Any, source: Any) -> Any:
    """Return the `[R]` index behind one that names the same row for every column of `source`."""
    expanded = isinstance(index, fx.Node) and index.target is ATEN.expand.default
    whole, chosen_from = tensor_of(index) if expanded else None, tensor_of(source)
    if whole is None or chosen_from is None or whole.stride(1) != 0:
        return None
    if expression_of(whole.shape[1]) != expression_of(chosen_from.shape[1]):
        return None
    node = index
    while isinstance(node, fx.Node) and node.target in SHAPING:
        node = node.args[0]
    rows = tensor_of(node)
    if rows is None or rows.dim() != 1:
        return None
    return node if expression_of(rows.shape[0]) == expression_of(whole.shape[0]) else None


def run_of_rows(node: fx.Node) -> fx.Node | None:
    """Return the rows that `node` is a run of: a slice along rows, or a piece of such a split."""
    cut: Any = node.args[0] if node.target is operator.getitem else node
    if cut.target is SPLIT:
        dim = cut.args[2] if len(cut.args) > 2 else cut.kwargs.get("dim", 0)
    elif cut.target is SLICE and cut is node and len(cut.args) < 5:
        dim = cut.args[1] if len(cut.args) > 1 else 0
    else:
        return None
    return cut.args[0] if dim == 0 else None


def start_of_run(node: fx.Node) -> int | None:
    """Return where the run of rows that `node` is begins; None for others, or if it is unknown."""
    if run_of_rows(node) is None:
        return None
    if node.target is SLICE:
        start = node.args[2] if len(node.args) > 2 else 0
        return start if isinstance(start, int) and start >= 0 else None
    if node.target is not operator.getitem:
        return None
    cut, number = node.args
    before = cut.args[1][:number]
    return sum(before) if all(isinstance(size, int) for size in before) else None


def rows_joined(node: fx.Node) -> list[fx.Node] | None:
    """Return the parts that `node` concatenates along rows, each once; None for any other node."""
    if node.target is not ATEN.cat.default:
        return None
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    parts = node.args[0]
    assert isinstance(parts, list | tuple)
    return [*parts] if dim == 0 and len(set(parts)) == len(parts) else None


def zero_rows(node: fx.Node) -> list[fx.Node] | None:
    """Return the nodes that make `node`, a fixed number of rows of zeros.

    Nobody else reads them, unless they are made of nothing.
    """
    rows = tensor_of(node)
    chain = [node]
    while chain[-1].target in SHAPING and len(chain[-1].users) == 1:
        chain.append(chain[-1].all_input_nodes[0])
    made = is_full_of_zeros(chain[-1])
    made |= chain[-1].target in ZEROS and len(chain[-1].users) == 1
    fixed = rows is not None and rows.dim() == 2 and isinstance(rows.shape[0], int)
    return chain if made and fixed else None


def pads_rows(node: fx.Node) -> bool:
    """Whether `node` joins rows of zeros to rows, and nothing else."""
    parts = rows_joined(node) or []
    return len(parts) > 1 and sum(zero_rows(part) is None for part in parts) == 1


def is_full_of_zeros(node: fx.Node) -> bool:
    """Whether `node` makes zeros as Inductor writes them; zeros below 0 have other bits."""
    value = node.args[1] if node.target is FULL else None
    is_number = isinstance(value, int | float)
    return is_number and value == 0 and math.copysign(1.0, value) > 0
