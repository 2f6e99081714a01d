"""A region's form: everything that its proof reads of it, without names; and proofs kept by form.

Contract
    Regions of equal forms differ in names of nodes and symbols alone, so that a fact proven of a
    node or symbol of one holds for that at the same place of another.
    A region with an object that no form tells from others has none: a tensor with values, say.
    A kept proof that is found is the one that proving would give. Refusals are not kept, since they
    name the nodes and the lines of their own region.
    No entry holds a graph, a tensor or a tracer; the latest `MOST` are kept.

Why equal forms have equal proofs
    The prover reads the region's nodes and their inputs: the functions they call, their arguments,
    the forms of their tensors and the modes they run under. Of tensors from outside it also reads
    whether they have gradients and which are constants; of the process, how many threads share the
    rows of a product. All of it is in the form, in the prover's order. Sizes are expressions in
    symbols. Of a symbol that only a run knows the form has the tracer's facts: its range, its
    replacement, the assertions about it. Any other symbol stands for itself, since a proof may
    fix its value by a guard: its name and its tracer are in the form.
    Functions, kernels and types are compared by identity. Only the stack traces of nodes are left
    out, and they are read for refusals, which are made anew.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import sympy
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from moe_compile.graph.aliases import origin
from moe_compile.graph.inner_graphs import CONSTANTS, KERNEL, body_named, launched_kernel
from moe_compile.graph.modes import Mode, modes, modes_around
from moe_compile.graph.query import is_leaf, value_of, waits_on
from moe_compile.proof.constants import constant_nodes, constants_behind
from moe_compile.proof.kernel_bits import KernelBits, bits
from moe_compile.regions.outside_reads import is_differentiable
from moe_compile.regions.regions import MoERegion, RowProof

PLAIN: Final = (
    bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
    torch.memory_format, range, enum.Enum, type(None), type(...),
)  # fmt: skip
"""Types whose `repr` determines the value."""
SYMBOLIC: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
MOST: Final = 64

_KEPT: Final[OrderedDict[tuple[object, bool, KernelBits], RowProof]] = OrderedDict()
"""Key of a form, whether sums round differently, and the model of last bits in use -> the proof, of
places in place of names."""


class _NoForm(Exception):
    """Something has no form."""


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """An object that is equal to itself alone."""

    object: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.object is other.object

    def __hash__(self) -> int:
        return id(self.object)


@dataclass(frozen=True, slots=True)
class RegionForm:
    """A key that is equal for regions that differ in names alone, and the names in this one."""

    key: tuple[object, ...]
    nodes: tuple[fx.Node, ...]
    """The nodes by their places."""
    symbols: Mapping[sympy.Symbol, sympy.Symbol]
    """Symbol of the tracer -> its name by its place."""


def form_of(region: MoERegion) -> RegionForm | None:
    """Return the form of `region`, None where it has none."""
    try:
        return _Writer(region).form()
    except (_NoForm, AttributeError):  # this torch keeps facts about symbols elsewhere
        return None


@dataclass(slots=True)
class _Writer:
    """Writes the form of one region, line by line."""

    region: MoERegion
    lines: list[str] = field(default_factory=list)
    objects: dict[_Same, int] = field(default_factory=dict)
    nodes: dict[fx.Node, int] = field(default_factory=dict)
    memories: dict[int, int] = field(default_factory=dict)
    symbols: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)
    env: ShapeEnv | None = None
    tracer: weakref.ref[ShapeEnv] | None = None
    """The tracer of symbols that stand for themselves, if there are any."""
    written: dict[sympy.Expr, str] = field(default_factory=dict)

    def form(self) -> RegionForm:
        region, constants = self.region, constant_nodes(self.region)
        inputs = [region.counts, region.received_counts, *(one.sent for one in region.dispatched)]
        body, mode_of = [*constants, *region.body], region.facts.modes
        around = [torch.get_num_threads(), *modes_around()]
        self.lines.append(repr([region.num_ranks, region.num_local_experts, *around]))
        for node in dict.fromkeys([*inputs, *region.others]):
            if node not in constants:
                self._outside(node)
        for node in body:
            self._call(node, mode_of[node])
        for kind in self._kinds(constants):
            self.lines.append(repr([self._place(node) for node in kind]))
        self._facts()
        key = ("\n".join(self.lines), tuple(self.objects), self.tracer)
        return RegionForm(key, tuple(self.nodes), self.symbols)

    def _kinds(self, constants: list[fx.Node]) -> list[list[fx.Node]]:
        """Return the nodes of each role in the region, and all nodes in graph order."""
        region = self.region
        launches = [region.count_exchange, *region.launches]
        kinds = [constants, region.body, region.count_side, region.others, launches, region.between]
        kinds += [[one.sent, one.result] for one in (*region.dispatched, *region.combined)]
        kinds += [[n for n in waits_on(one) if n in self.nodes] for one in region.launches]
        return [*map(list, kinds), sorted(self.nodes)]

    def _place(self, node: fx.Node) -> int:
        """Return the place of a node, which is written first if it was not met yet."""
        if node not in self.nodes:
            self._outside(node)
        return self.nodes[node]

    def _outside(self, node: fx.Node) -> None:
        """Write the facts that are read of a node that is not run."""
        place = self.nodes[node] = len(self.nodes)
        made = origin(node)
        body = body_named(node)
        if body is not None:
            self.lines.append(f"{place} {self._graph(body)}")
            return
        said = (
            self._value(value_of(node)),
            is_differentiable(made),
            constants_behind(node, self.region),
        )
        of = place if made is node else self._place(made)
        self.lines.append(f"{place} of {of} {node.op in ('placeholder', 'get_attr')} {said}")

    def _call(self, node: fx.Node, mode: Mode) -> None:
        """Write a node that is run."""
        called = self._called(node, self._place)
        switches = [self._called(switch, self._place) for switch in mode[1]]
        said = f"{called} {mode[0]!r} {switches} {self._value(value_of(node))}"
        self.nodes.setdefault(node, len(self.nodes))
        self.lines.append(f"{self.nodes[node]} {said}")

    def _called(self, node: fx.Node, place: Callable[[fx.Node], int]) -> str:
        target = node.target if isinstance(node.target, str) else self._same(node.target)
        kwargs = dict(node.kwargs)
        if (launched := launched_kernel(node)) is not None:
            kwargs[KERNEL], kwargs[CONSTANTS] = _Same(launched[0]), launched[1]
        return f"{node.op} {target} {self._value((node.args, kwargs), place)}"

    def _graph(self, body: fx.GraphModule) -> str:
        """Return the form of a graph that a node runs; its inner names are its own."""
        places: dict[fx.Node, int] = {}
        in_force, lines = modes(body.graph), []
        for node in body.graph.nodes:
            inner = body_named(node)
            if inner is None and node.op == "get_attr":
                raise _NoForm
            text = self._called(node, places.__getitem__) if inner is None else self._graph(inner)
            mode, switches = in_force[node]
            thrown = [self._called(switch, places.__getitem__) for switch in switches]
            places[node] = len(places)
            is_named = node.op in ("placeholder", "get_attr")
            lines.append(node.op if is_named and inner is None else f"{text} {mode!r} {thrown}")
        return repr(lines)

    def _same(self, thing: Any) -> str:
        number = self.objects.setdefault(_Same(thing), len(self.objects))
        return f"object {number}"

    def _value(self, value: Any, place: Callable[[fx.Node], int] | None = None) -> str:
        """Return the form of an argument, or of a value that the tracer found.

        `place` gives the places of nodes.
        """
        kind = "list" if isinstance(value, list) else "tuple"
        if isinstance(value, slice):
            kind, value = "slice", (value.start, value.stop, value.step)
        elif isinstance(value, Mapping):
            kind, value = "mapping", tuple(value.items())
        if isinstance(value, list | tuple):
            return f"{kind} ({', '.join(self._value(part, place) for part in value)})"
        if isinstance(value, fx.Node) and place is not None:
            return f"node {place(value)}"
        return self._leaf(value)

    def _leaf(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, SYMBOLIC):
            return self._size(value)
        if isinstance(value, PLAIN):
            return f"{type(value).__name__} {value!r}"
        thing = value.object if isinstance(value, _Same) else value
        if isinstance(value, _Same) or callable(thing):
            return self._same(thing)
        raise _NoForm

    def _tensor(self, tensor: torch.Tensor) -> str:
        if type(tensor) is not FakeTensor and type(tensor) is not torch.nn.Parameter:
            raise _NoForm
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            raise _NoForm
        memory = int(tensor.untyped_storage()._cdata)
        sizes = [self._size(s) for s in (*tensor.shape, *tensor.stride(), tensor.storage_offset())]
        about = tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, is_leaf(tensor)
        number = self.memories.setdefault(memory, len(self.memories))
        return f"{type(tensor).__name__} {about} {sizes} memory {number}"

    def _size(self, size: Any) -> str:
        """Return a size as it was computed, and as the tracer replaced it since."""
        if not isinstance(size, SYMBOLIC):
            return repr(size)
        env = size.node.shape_env
        if self.env is not None and env is not self.env:
            raise _NoForm
        self.env = env
        made, found = self._expression(size.node._expr), self._expression(size.node.expr)
        return made if made == found else f"{made} is {found}"

    def _expression(self, expression: Any) -> str:
        if expression not in self.written:
            new = sorted(expression.free_symbols - self.symbols.keys(), key=_in_order)
            for symbol in new:
                about = symbol.assumptions0
                self.symbols[symbol] = sympy.Symbol(f"symbol_{len(self.symbols)}", **about)
            self.written[expression] = str(expression.xreplace(self.symbols))
        return self.written[expression]

    def _facts(self) -> None:
        """Write the tracer's facts about symbols, and about those met on the way."""
        known: set[sympy.Symbol] = set()
        while new := [symbol for symbol in self.symbols if symbol not in known]:
            known.update(new)
            for symbol in new:
                self.lines.append(f"{self.symbols[symbol]} {self._fact(symbol)}")

    def _fact(self, symbol: sympy.Symbol) -> str:
        env: Any = self.env
        if not free_unbacked_symbols(symbol):
            self.tracer = weakref.ref(env)
            return f"{symbol}"
        assertions = env.deferred_runtime_asserts.get(symbol, ())
        asserted = {self._expression(one.expr) for one in assertions}
        replaced = env.replacements.get(symbol)
        said = sorted(symbol.assumptions0.items()), env.var_to_range.get(symbol), sorted(asserted)
        is_size = symbol in env.size_like
        return f"{said} {is_size} {None if replaced is None else self._expression(replaced)}"


def _in_order(symbol: sympy.Symbol) -> tuple[int, str]:
    """Sort `u9` before `u10`."""
    return len(symbol.name), symbol.name


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for the node at a place."""

    number: int


def kept_proof(form: RegionForm, *, may_round: bool) -> RowProof | None:
    """Return the proof of the region that has this form, None where no like region was proven.

    A proof that needs no sums that round differently serves `may_round` too.
    """
    for rounds in (False, True)[: 1 + may_round]:
        proof = _KEPT.get((form.key, rounds, bits()))
        if proof is not None:
            _KEPT.move_to_end((form.key, rounds, bits()))
            nodes = {_Place(number): node for number, node in enumerate(form.nodes)}
            return _renamed(proof, nodes, {there: here for here, there in form.symbols.items()})
    return None


def keep_proof(form: RegionForm, proof: RowProof, *, may_round: bool) -> None:
    """Keep the proof of the region that has this form, unless it names others."""
    places = {node: _Place(number) for number, node in enumerate(form.nodes)}
    with suppress(KeyError):
        _KEPT[form.key, may_round, bits()] = _renamed(proof, places, form.symbols)
    while len(_KEPT) > MOST:
        _KEPT.popitem(last=False)


def forget() -> None:
    """Forget all proofs kept."""
    _KEPT.clear()


def _renamed(proof: RowProof, nodes: Mapping[Any, Any], symbols: Mapping[Any, Any]) -> RowProof:
    fields = {f.name: getattr(proof, f.name) for f in dataclasses.fields(proof)}
    facts = fields.pop("facts")
    said = {name: _with_nodes(value, nodes) for name, value in fields.items()}
    return RowProof(**said, facts=facts and facts.renamed(symbols))


def _with_nodes(value: Any, nodes: Mapping[Any, Any]) -> Any:
    if isinstance(value, fx.Node | _Place):
        return nodes[value]
    if isinstance(value, tuple):
        return tuple(_with_nodes(part, nodes) for part in value)
    if isinstance(value, dict):
        return {nodes[node]: part for node, part in value.items()}
    return value
