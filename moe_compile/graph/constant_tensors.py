"""Tensors of zeros or ones: their makers name their sizes, and all their numbers are the same.

Contract
    One is recognised by the function of torch that makes it. It may be made anew in other sizes, if
    these are all that its readers need of it; later writes into it are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.graph.query import tensor_of
from moe_compile.graph.torch_calls import torch_name

MAKERS: Final[dict[str, Callable[..., Any]]] = {
    "zeros": torch.zeros,
    "new_zeros": torch.zeros,
    "ones": torch.ones,
    "new_ones": torch.ones,
}
KNOWN: Final = frozenset({"size", "dtype", "layout", "device", "pin_memory"})
"""Arguments that say no more than the tensor's own form."""


def maker_of(node: fx.Node) -> Callable[..., Any] | None:
    """Return the function of `(sizes, dtype=, device=)` that makes it; None for another node."""
    tensor = tensor_of(node)
    if tensor is None or tensor.layout is not torch.strided or not node.kwargs.keys() <= KNOWN:
        return None
    return MAKERS.get(torch_name(node))
