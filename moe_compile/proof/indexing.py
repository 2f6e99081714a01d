"""Indexing operators in one form: a tensor read or written along one dimension by one vector.

Contract
    An operator of another form is not followed.
    An index as wide as the rows, `index[:, None].expand(-1, D)`, moves them as the vector does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from moe_compile.proof.operator_call import Call, dim_of
from moe_compile.regions.row_domain import IndexPerColumn, Value

INDEX_TYPES: Final = (torch.int32, torch.int64)
MASKED: Final = ("index", "index_put", "_unsafe_index_put")
"""Operators that take a mask as the indices of its nonzero entries."""
ELEMENTWISE: Final = ("gather", "scatter", "scatter_add")
"""Operators whose index has an entry for every element."""
WRITES: Final = frozenset(
    {"index_put", "_unsafe_index_put", "index_copy", "index_add", "scatter", "scatter_add"}
)


@dataclass(frozen=True, slots=True)
class Indexing:
    """`base` read or written along `dim` by the vector `index`."""

    base: torch.Tensor
    dim: int
    index: torch.Tensor
    """`[R]`, or a tensor each row of which repeats one entry of such a vector."""
    source: torch.Tensor | None = None
    adds: bool = False
    wraps: bool = False
    """Whether a negative index counts from the end."""


def indexing(call: Call) -> Indexing | None:
    """Return the one-vector form of an indexing operator, or None when it has another form."""
    base = call.inputs[0]
    source = call.argument("values", call.argument("source", call.argument("src")))
    adds = bool(call.argument("accumulate", False)) or call.name in ("index_add", "scatter_add")
    if call.argument("indices") is not None and call.name != "embedding":
        given = list(call.argument("indices"))
        where = [i for i, index in enumerate(given) if index is not None]
        if len(where) != 1:
            return None
        dim, index = where[0], given[where[0]]
    else:
        index = call.argument("index", call.argument("indices"))
        dim = dim_of(call.argument("dim", 0), base.dim())
        if call.name in ELEMENTWISE and not _moves_rows(call, base, dim, index, source):
            return None
    is_mask = index.dtype is torch.bool and call.name in MASKED
    is_vector = index.dim() == 1 or call.name in ELEMENTWISE
    if not is_vector or not (is_mask or index.dtype in INDEX_TYPES):
        return None
    return Indexing(base, dim, index, source, adds, wraps=call.name in MASKED)


def index_of(call: Call, form: Indexing) -> Value:
    """Return the value of the vector by which rows are moved."""
    value = call.value(form.index)
    return value.index if isinstance(value, IndexPerColumn) and call.name in ELEMENTWISE else value


def _moves_rows(
    call: Call, base: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor | None
) -> bool:
    """Whether an operator with an index for each element moves whole rows along dim 0."""
    if base.dim() == 1:
        return index.dim() == 1
    of_rows = dim == 0 and isinstance(call.value(index), IndexPerColumn)
    given = [t for t in (index, source) if t is not None]
    alike = [call.shape(t)[1:] == call.shape(base)[1:] for t in given]
    return of_rows and index.dim() == base.dim() and all(alike)
