"""Tensors of zeros or ones: what makes them says their sizes, and all their numbers are the same.

Contract
    One is told by the function of torch that makes it. It may be made anew in other sizes, where
    these are all that its readers need of it; what is written into it later is not looked at.
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
"""Arguments that say no more than what is read off the tensor."""


def maker_of(node: fx.Node) -> Callable[..., Any] | None:
    """Return what makes such a tensor of `(sizes, dtype=, device=)`; None for another node."""
    tensor = tensor_of(node)
    if tensor is None or tensor.layout is not torch.strided or not node.kwargs.keys() <= KNOWN:
        return None
    return MAKERS.get(torch_name(node))
