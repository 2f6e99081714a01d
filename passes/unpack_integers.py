"""Take the integers that the host reads of one vector by one call.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value; every integer keeps its symbol, so that sizes stay the same.

    [v[0].item(), v[1].item()], v on the host  ->  integers(v, [0, 1])

It runs after the partition: values that the backward pass needs are numbers by then, and it is
given these.
A lone integer stays, a size of one sum, say: the report has its line.

`write_as_list` makes Inductor write one `tolist` for `megamoe::integers`, with the same integers
under the same symbols. Where torch lacks the means the operator is called: torch then converts
every integer twice, 0.25 µs each.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import sympy
import torch
import torch._inductor.config as inductor_config
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import resolve_unbacked_bindings
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import SequenceKey

from moe_compile.graph.edit import Emitter, call_otherwise, erase_unused
from moe_compile.graph.precedence import HOST_READ
from moe_compile.graph.query import (
    is_integer,
    known_rows,
    operator_at,
    overload_name,
    source_place,
    tensor_of,
)
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.ops.integers import INTEGERS
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass

SELECT: Final = torch.ops.aten.select.int
BINDINGS: Final = "unbacked_bindings"
"""Key in `node.meta`: the symbols that a node gives a value, and where in its value they are."""


@dataclass(frozen=True)
class UnpackIntegers(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "unpack_integers"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    commutes_with: ClassVar[frozenset[str]] = frozenset({"split_addends"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Unpack every vector of which more than one integer is read."""
        if state.config.codegen == "inductor":
            write_as_list()
        reads = [node for node in graph.nodes if overload_name(node) == HOST_READ]
        of_vector: dict[fx.Node, list[fx.Node]] = {}
        for read in reads:
            if (vector := _vector(read)) is not None:
                of_vector.setdefault(vector, []).append(read)
        is_python = not inductor_config.cpp_wrapper  # which has no lists of integers
        lists = {vector: _numbered(its) for vector, its in of_vector.items() if is_python}
        lists = {vector: numbered for vector, numbered in lists.items() if len(numbered) > 1}
        taken = {read: None for numbered in lists.values() for read in numbered}
        places = Counter(source_place(read) or read.name for read in taken)
        detail = "" if is_python else "Inductor's cpp_wrapper is on"
        skipped = tuple(_alone(read, detail) for read in reads if read not in taken)
        for vector, numbered in lists.items():
            _unpack(vector, numbered)
        return PassReport(
            pass_name=self.name,
            applied=tuple(f"{number} integers at {place}" for place, number in places.items()),
            skipped=skipped,
        )


def _alone(read: fx.Node, detail: str) -> Verdict:
    where = source_place(read)
    return Verdict(
        candidate=operator_at(read), reason=Reason.READ_ALONE, detail=detail, where=where
    )


def _vector(read: fx.Node) -> fx.Node | None:
    """Return the vector on the host whose element `read` is, if there is one."""
    element = read.args[0]
    assert isinstance(element, fx.Node)
    if element.target is not SELECT or type(element.args[2]) is not int:
        return None
    vector = element.args[0]
    assert isinstance(vector, fx.Node)
    value = tensor_of(vector)
    is_vector = value is not None and value.device.type == "cpu" and value.dim() == 1
    return vector if is_vector and is_integer(vector) and known_rows(vector) else None


def _place(read: fx.Node) -> int:
    """Return the index of the element read in its vector."""
    vector, _, place = read.all_input_nodes[0].args
    assert isinstance(vector, fx.Node) and isinstance(place, int)
    return place % known_rows(vector)


def _numbered(reads: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return the reads of a vector that one list serves, each with its place in the list.

    A read has a symbol of its own, or that of another read of the same element, which torch
    remembers; where its symbol stands for something else, a quarter of the integer say, it stays.
    """
    own = [read for read in reads if list((read.meta.get(BINDINGS) or {}).values()) == [()]]
    numbered = {read: number for number, read in enumerate(own)}
    of_place = {_place(read): number for read, number in numbered.items()}
    for read in reads:
        if not read.meta.get(BINDINGS) and _place(read) in of_place:
            numbered[read] = of_place[_place(read)]
    return numbered


def _unpack(vector: fx.Node, numbered: Mapping[fx.Node, int]) -> None:
    own = [read for read in numbered if read.meta.get(BINDINGS)]
    elements = dict.fromkeys(read.all_input_nodes[0] for read in numbered)
    numbers = Emitter(min(numbered)).call(INTEGERS, vector, list(map(_place, own)))
    numbers.meta["val"] = [read.meta["val"] for read in own]
    numbers.meta[BINDINGS] = {
        symbol: (SequenceKey(numbered[read]),) for read in own for symbol in read.meta.pop(BINDINGS)
    }
    for read, number in numbered.items():
        call_otherwise(read, operator.getitem, numbers, number)
    erase_unused(elements)


@functools.cache
def write_as_list() -> bool:
    """Have Inductor write `tolist` from now on; return whether this torch has the means."""
    try:
        base: Any = importlib.import_module("torch._inductor.ir").DynamicScalar
        lowering = importlib.import_module("torch._inductor.lowering")
        virtualized = importlib.import_module("torch._inductor.virtualized")
    except (ImportError, AttributeError):
        return False

    class ListedIntegers(base):
        """A list, and the names of its integers."""

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
