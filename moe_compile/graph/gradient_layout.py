"""Whether what a reader adds to the gradient of a tensor lies in memory row by row.

Adding two numbers commutes, yet `a + b` lies in memory as `a` does where the two differ
(`reorder_dimensions` of aten/src/ATen/TensorIterator.cpp), and sums over a tensor round by how it
lies. So two terms may change places only where both lie alike.

Contract
    A term is known to lie row by row where going back through the reader on fake tensors makes it
    so of a gradient laid out in whatever order, or of one that lies row by row and comes from
    readers of which the same is known. A dimension along which one number is repeated fits both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.graph.inner_graphs import is_higher_order
from moe_compile.graph.observation import call, fake_mode_of, running_on
from moe_compile.graph.query import (
    expression_of,
    has_gradient,
    is_launch,
    is_wait,
    tensor_of,
    value_of,
)
from moe_compile.graph.same_tensor import maker, readers

Found = TypeVar("Found")
Lay = Callable[[torch.Tensor], torch.Tensor]
"""Returns a tensor of the same shape, laid out in some order."""


def lies_by_rows(reader: fx.Node, source: fx.Node) -> bool:
    """Whether the term that `reader` adds to the gradient of `source` lies row by row."""
    return _Terms().lies_by_rows(reader, source)


class _Terms:
    """What is known of terms so far: graphs have several ways from one node to another."""

    def __init__(self) -> None:
        self._known: dict[tuple[fx.Node, fx.Node], bool] = {}

    def lies_by_rows(self, reader: fx.Node, source: fx.Node) -> bool:
        key = (reader, source)
        if key not in self._known:
            self._known[key] = False  # where it leads back to itself
            self._known[key] = self._lies_by_rows(reader, source)
        return self._known[key]

    def _lies_by_rows(self, reader: fx.Node, source: fx.Node) -> bool:
        tensor = tensor_of(source)
        if tensor is None or tensor.dim() < 2 or is_launch(reader):
            return tensor is not None
        if reader.op == "output":  # AOTAutograd takes gradients of outputs laid out as these are
            return _by_rows(tensor)
        if is_wait(reader):
            return self._all_readers(reader)
        plain, reverse = (_term(reader, source, lay) for lay in (_row_by_row, _in_reverse))
        if plain is None or not _by_rows(plain):
            return False
        return (reverse is not None and _by_rows(reverse)) or self._all_readers(reader)

    def _all_readers(self, node: fx.Node) -> bool:
        adding = [r for r in readers(node) if r.op == "output" or has_gradient(r)]
        return tensor_of(node) is not None and all(self.lies_by_rows(r, node) for r in adding)


def _by_rows(tensor: torch.Tensor) -> bool:
    plain = torch.empty(tensor.shape, device="meta").stride()
    pairs = zip(tensor.stride(), plain, strict=True)
    return all(expression_of(a) in (0, expression_of(b)) for a, b in pairs)


def _term(reader: fx.Node, source: fx.Node, lay: Lay) -> torch.Tensor | None:
    """Return what `reader` adds, given gradients as `lay` lays them out; None: it is not known."""

    def term(made: Any, read: torch.Tensor) -> torch.Tensor:
        leaves = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
        each = [t for t in leaves if t.requires_grad]
        return torch.autograd.grad(each, read, list(map(lay, each)))[0]

    return on_gradient(reader, source, term)


def on_gradient(
    reader: fx.Node, source: fx.Node, look: Callable[[Any, torch.Tensor], Found]
) -> Found | None:
    """Run `reader` on fake tensors of which `source` needs a gradient.

    Returns what `look` finds in what was made, and in what was read of `source`; None where the
    node cannot be run.
    """
    inputs = reader.all_input_nodes
    fake = fake_mode_of([*map(value_of, inputs), value_of(reader)])
    if fake is None or is_higher_order(reader) or any(value_of(i) is None for i in inputs):
        return None
    with running_on(fake), torch.enable_grad():
        given: dict[fx.Node, Any] = {}
        for node in inputs:
            value = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value_of(node))
            if isinstance(value, torch.Tensor) and maker(node) is source:
                read = value = value.requires_grad_() * 1
            given[node] = value
        args, kwargs = fx.node.map_arg((reader.args, reader.kwargs), given.__getitem__)
        try:
            return look(call(reader, args, kwargs), read)
        except Exception:  # noqa: BLE001  (whatever a function raises: it is not followed)
            return None


def _row_by_row(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _in_reverse(tensor: torch.Tensor) -> torch.Tensor:
    dims = [*range(tensor.dim() - 1, -1, -1)]
    shape = [tensor.shape[d] for d in dims]
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device).permute(dims)
