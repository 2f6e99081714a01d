"""The aten operators that run while nodes of a graph run on fake tensors, one by one.

Contract
    Arguments are read by the names of the operator's schema, defaults included.
    An operator of a backward is noted for the node whose backward it is. An operator that makes and
    writes no tensor, or runs for no node, is not noted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx as fx
from torch._decomp import decomposition_table
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from moe_compile.graph.memory import tensors_in
from moe_compile.graph.observation import written_by_schema

SAME_VALUES: Final = frozenset({"_to_copy", "clone", "alias", "detach", "lift_fresh", "copy"})
"""Operators that only copy, cast or rename, beside those tagged pointwise."""
UNTRACEABLE: Final = (
    RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError,
)  # fmt: skip
"""Exceptions that a node may raise on fake tensors where this torch cannot trace it."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One aten operator that `node` ran."""

    node: fx.Node
    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def name(self) -> str:
        """`mm` of `aten::mm`; other namespaces are kept."""
        return str(self.func._schema.name).removeprefix("aten::")

    @property
    def is_pointwise(self) -> bool:
        """Whether element i of the output reads only elements i of the inputs, broadcast."""
        return torch.Tag.pointwise in self.func.tags or self.name in SAME_VALUES

    def argument(self, name: str, default: Any = None) -> Any:
        """Return the argument called `name` in the schema, or its default, or `default`."""
        for i, declared in enumerate(self.func._schema.arguments):
            if declared.name == name:
                given = self.args[i] if i < len(self.args) else None
                found = self.kwargs.get(name, given)
                return declared.default_value if found is None else found
        return default

    @property
    def leaves(self) -> list[Any]:
        """All arguments, lists flattened."""
        return pytree.tree_leaves((self.args, self.kwargs))

    @property
    def inputs(self) -> list[torch.Tensor]:
        """All tensor arguments, in order."""
        return tensors_in(self.leaves)

    @property
    def outputs(self) -> list[torch.Tensor]:
        """All tensors returned, in order."""
        return tensors_in(self.out)

    @property
    def written(self) -> list[torch.Tensor]:
        """All tensors the operator writes in place, by its schema."""
        return tensors_in(written_by_schema(self.func, self.args, self.kwargs))


def _always(func: torch._ops.OpOverload) -> bool:
    del func
    return True


class Recorder(TorchDispatchMode):
    """A mode that reports every operator that makes or writes tensors."""

    def __init__(
        self,
        note: Callable[[Operator], None],
        is_known: Callable[[torch._ops.OpOverload], bool] = _always,
    ) -> None:
        """Call `note` for each operator; one that is not known is decomposed where torch can."""
        super().__init__()
        self._note, self._is_known = note, is_known
        self.node: fx.Node | None = None
        """The node that runs."""
        self._made_by: dict[Any, fx.Node | None] = {}
        """Node of the graph of gradients -> the node whose backward it is."""

    def run(self, node: fx.Node | None, run: Callable[[], Any]) -> Any:
        """Return the result of `run`; its operators, and those of its backward, are of `node`."""
        self.node = node
        made = run()
        self.node = None
        for tensor in tensors_in(made):
            self._note_gradients(tensor.grad_fn, node)
        return made

    def _note_gradients(self, function: Any, node: fx.Node | None) -> None:
        todo = [function]
        while todo:
            function = todo.pop()
            if function is not None and function not in self._made_by:
                self._made_by[function] = node
                todo += [following for following, _ in function.next_functions]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and note it."""
        del types
        kwargs = kwargs or {}
        if not self._is_known(func):
            with self:
                taken_apart = decomposition_table.get(func, func.decompose)(*args, **kwargs)
            if taken_apart is not NotImplemented:
                return taken_apart
        out = func(*args, **kwargs)
        going_back = torch._C._current_autograd_node()
        node = self._made_by.get(going_back) if going_back is not None else self.node
        if node is not None and (tensors_in(out) or func._schema.is_mutable):
            self._note(Operator(node, func, args, kwargs, out))
        return out
