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
BY_PLACES: Final = frozenset({"sum_of_places", "dots_of_places"})
"""Ours, of rows in several matrices by a matrix of their numbers."""
OWN_GATHERS: Final = frozenset(
    {"gather_quantize_pack", "gather_rows", "unpack_dequantize_permute", *BY_PLACES}
)
"""Ours, of rows by an index; without one all are read."""


def reads_pieces(node: fx.Node) -> bool:
    """Whether the operator takes rows of several matrices by their places."""
    return overload_name(node).rpartition("::")[2] in BY_PLACES


def gathered_bytes(gather: fx.Node, sizes: NominalSizes) -> dict[fx.Node, float]:
    """Return the bytes that `gather` reads of each tensor it takes rows from; {} for no gather."""
    op = overload_name(gather).rpartition("::")[2]
    if op in GATHERS:
        source = gather.all_input_nodes[0]
        taken = float(sizes.nbytes(value_of(gather)))
        return {source: min(taken, float(sizes.nbytes(value_of(source))))}
    if op not in OWN_GATHERS:
        return {}
    sources, places = [gather.args[0]], gather
    if op in BY_PLACES:
        sources, places = gather.args[:2]
    number = math.prod(_shape(places, sizes)[: 2 if op in BY_PLACES else 1])
    share = min(1.0, number / max(sum(_shape(source, sizes)[0] for source in sources), 1))
    return {source: share * float(sizes.nbytes(value_of(source))) for source in sources}


def _shape(node: fx.Node, sizes: NominalSizes) -> tuple[int, ...]:
    tensor = tensor_of(node)
    return (1,) if tensor is None else tuple(sizes.shape(tensor))
