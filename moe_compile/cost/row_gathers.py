"""How much of a tensor is read where rows of it are gathered.

Contract
    As many rows as are asked for, and no more than there are: what is read twice is in a cache.
    Gathers by the columns of one matrix of places, clamped since -1 is none, as sums of two hops
    are made (`moe_compile/ops/hop_sums.py`), are taken to read each row once altogether.
"""

from __future__ import annotations

import operator
from typing import Final

import torch.fx as fx

from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import overload_name, tensor_of, value_of

GATHERS: Final = frozenset({"embedding", "gather", "index", "index_select"})
"""Operators of torch that gather, all of which a compiler fuses with what reads the rows."""
OWN_GATHERS: Final = frozenset({"gather_quantize_pack", "gather_rows", "unpack_dequantize_permute"})
"""Ours, of rows by an index; without one all are read."""


def gathered_bytes(gather: fx.Node, sizes: NominalSizes) -> float:
    """Return the bytes that `gather` reads of its first tensor."""
    source = gather.all_input_nodes[0]
    whole = float(sizes.nbytes(value_of(source)))
    if overload_name(gather).rpartition("::")[2] in OWN_GATHERS:
        asked, there = (_num_rows(node, sizes) for node in (gather, source))
        return whole * min(1.0, asked / max(there, 1))
    return min(float(sizes.nbytes(value_of(gather))), whole / _num_columns(gather, sizes))


def _num_rows(node: fx.Node, sizes: NominalSizes) -> int:
    tensor = tensor_of(node)
    return 1 if tensor is None else sizes.shape(tensor)[0]


def _num_columns(gather: fx.Node, sizes: NominalSizes) -> int:
    """Return the columns of the matrix one of which says where rows are; 1 where none does."""
    for column in gather.all_input_nodes[1:]:
        places = _matrix_of(column)
        if places is not None and overload_name(places) in ("aten::clamp", "aten::clamp_min"):
            tensor = tensor_of(places)
            return 1 if tensor is None else max(1, sizes.shape(tensor)[1])
    return 1


def _matrix_of(column: fx.Node) -> fx.Node | None:
    """Return the matrix of which `column` is a column, as `unbind` gives it."""
    if column.target is not operator.getitem:
        return None
    (parts,) = column.all_input_nodes
    is_of_columns = overload_name(parts) == "aten::unbind" and parts.args[1:] == (1,)
    return parts.all_input_nodes[0] if is_of_columns else None
