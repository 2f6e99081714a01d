"""How much of a tensor is read where rows of it are gathered.

Contract
    As many rows as are asked for, and no more than there are: what is read twice is in a cache.
"""

from __future__ import annotations

import math
from typing import Final

import torch.fx as fx

from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import overload_name, tensor_of, value_of

GATHERS: Final = frozenset({"embedding", "gather", "index", "index_select"})
"""Operators of torch that gather, all of which a compiler fuses with what reads the rows."""
SUM_OF_PLACES: Final = "sum_of_places"
OWN_GATHERS: Final = frozenset(
    {"gather_quantize_pack", "gather_rows", "unpack_dequantize_permute", SUM_OF_PLACES}
)
"""Ours, of rows by an index; without one all are read."""


def gathered_bytes(gather: fx.Node, sizes: NominalSizes) -> float:
    """Return the bytes that `gather` reads of its first tensor."""
    source = gather.all_input_nodes[0]
    whole = float(sizes.nbytes(value_of(source)))
    if (op := overload_name(gather).rpartition("::")[2]) not in OWN_GATHERS:
        return min(float(sizes.nbytes(value_of(gather))), whole)
    asked = _shape(gather.all_input_nodes[1] if op == SUM_OF_PLACES else gather, sizes)
    num_asked = math.prod(asked) if op == SUM_OF_PLACES else asked[0]
    return whole * min(1.0, num_asked / max(_shape(source, sizes)[0], 1))


def _shape(node: fx.Node, sizes: NominalSizes) -> tuple[int, ...]:
    tensor = tensor_of(node)
    return (1,) if tensor is None else tuple(sizes.shape(tensor))
