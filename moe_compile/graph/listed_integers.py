"""What makes Inductor write one `tolist` for `megamoe::integers`.

Contract
    The same integers under the same symbols. Where torch lacks the means the operator is called:
    torch then converts every integer twice, 0.25 µs each.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import resolve_unbacked_bindings
from torch.utils._ordered_set import OrderedSet

from moe_compile.ops.integers import INTEGERS


@functools.cache
def write_as_list() -> bool:
    """Have Inductor write it so from now on; return whether this torch has the means."""
    try:
        base: Any = importlib.import_module("torch._inductor.ir").DynamicScalar
        lowering = importlib.import_module("torch._inductor.lowering")
        virtualized = importlib.import_module("torch._inductor.virtualized")
    except (ImportError, AttributeError):
        return False

    class ListedIntegers(base):
        """A list, and the names that its integers are given."""

        def __init__(self, places: Mapping[sympy.Symbol, int], vector: Any) -> None:
            super().__init__(next(iter(places)), (), vector)
            self._places = places

        def get_unbacked_symbol_defs(self) -> OrderedSet[sympy.Symbol]:
            return OrderedSet(self._places)

        def codegen(self, wrapper: Any) -> None:
            (vector,) = (tensor.codegen_reference() for tensor in self.inputs)
            name = self.get_name()
            wrapper.writeline(f"{name} = {vector}.tolist()")
            for symbol, place in self._places.items():
                wrapper.writeline(f"{symbol} = {name}[{place}]")
            wrapper.writeline(f"{name} = None")

    def lower(vector: Any, places: Sequence[int]) -> list[Any]:
        graph = virtualized.V.graph
        meta = graph.current_node.meta
        bindings = resolve_unbacked_bindings(graph.sizevars.shape_env, meta["unbacked_bindings"])
        assert bindings is not None
        found = {symbol: places[path[0].idx] for symbol, path in bindings.items()}
        listed = ListedIntegers(found, vector)
        listed.name = graph.register_buffer(listed)
        graph.register_operation(listed)
        return [v.node.expr if isinstance(v, torch.SymInt) else v for v in meta["val"]]

    lowering.register_lowering(INTEGERS, type_promotion_kind=None)(lower)
    return True
