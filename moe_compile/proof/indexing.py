"""Indexing operators in one form: a tensor read or written along one dimension by one vector.

Contract
    An operator of another form is none of these: nothing is followed of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from moe_compile.proof.operator_call import Call, dim_of

INDEX_TYPES: Final = (torch.int32, torch.int64)
MASKED: Final = ("index", "index_put", "_unsafe_index_put")
"""Operators that take a mask for the indices of what is not 0 in it."""


@dataclass(frozen=True, slots=True)
class Indexing:
    """`base` read or written along `dim` by the vector `index`."""

    base: torch.Tensor
    dim: int
    index: torch.Tensor
    source: torch.Tensor | None = None
    adds: bool = False
    wraps: bool = False
    """Whether a negative index counts from the end."""


def indexing(call: Call) -> Indexing | None:
    """Return the one-vector form of an indexing operator, or None when it has another form."""
    base = call.inputs[0]
    source = call.argument("values", call.argument("source"))
    adds = bool(call.argument("accumulate", False)) or call.name == "index_add"
    if call.argument("indices") is not None and call.name != "embedding":
        given = list(call.argument("indices"))
        where = [i for i, index in enumerate(given) if index is not None]
        if len(where) != 1:
            return None
        dim, index = where[0], given[where[0]]
    else:
        index = call.argument("index", call.argument("indices"))
        dim = dim_of(call.argument("dim", 0), base.dim())
        if call.name == "gather" and base.dim() != 1:
            return None
    is_mask = index.dtype is torch.bool and call.name in MASKED
    if index.dim() != 1 or not (is_mask or index.dtype in INDEX_TYPES):
        return None
    return Indexing(base, dim, index, source, adds, wraps=call.name in MASKED)
