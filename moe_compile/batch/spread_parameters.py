"""Parameters that are repeated for every index of the batch: a class token, learned queries.

Contract
    Each part repeats a parameter in its own sizes, instead of cutting the whole: the gradient of
    a part is the sum over its own indices, as accumulation over parts gives it.
    Repetitions other than one run of elements behind another are refused.
"""

from __future__ import annotations

from typing import Any, Final

import torch.fx as fx

from moe_compile.dims.arguments import moved
from moe_compile.dims.factors import Dims, Factor, Lost, flat, holds, size_of
from moe_compile.dims.tracker import Tracker
from moe_compile.graph.query import called_name, has_gradient, tensor_of

EXPANDS: Final = frozenset({"expand", "broadcast_to"})
REPEATS: Final = frozenset({"repeat", "tile"})
OTHERS: Final = frozenset({"expand_as", "repeat_interleave", "index_select", "embedding", "gather"})
"""Other operators that repeat elements, which are not made anew in other sizes."""


def is_spread(node: fx.Node, tracker: Tracker, batch: Factor) -> bool:
    """Whether `node`, with the batch and no input that depends on it, repeats a parameter."""
    name = called_name(node)
    if not has_gradient(node) or name not in EXPANDS | REPEATS | OTHERS:
        return False
    if name in OTHERS or not _is_outermost(node, tracker, batch):
        raise Lost(f"{name} repeats a parameter once for each index of the batch")
    return True


def repeats_in(node: fx.Node, sizes: list[int]) -> list[int]:
    """Return the repetitions of each dimension by which `repeat` gives `sizes`."""
    return [size // given for size, given in zip(sizes, _given_sizes(node), strict=True)]


def _is_outermost(node: fx.Node, tracker: Tracker, batch: Factor) -> bool:
    """Whether each index of the batch has the same elements."""
    dims: Dims = tracker.dims(node)
    along = next(i for i, dim in enumerate(dims) if holds(dim, batch))
    given = _given_sizes(node)[along]
    if given == 1:
        return True
    first, *inner = flat(dims[along])
    return called_name(node) in REPEATS and first is batch and size_of(inner) % given == 0


def _given_sizes(node: fx.Node) -> list[Any]:
    """Return the sizes of the tensor repeated, with 1 for each dimension that is added."""
    whole, given = tensor_of(node), tensor_of(moved(node))
    assert whole is not None and given is not None
    return [1] * (whole.dim() - given.dim()) + list(given.shape)
