"""The factors of the values of one region or graph, through its operators.

Contract
    A node is followed by the aten operators that it runs, under the modes of its place in the
    graph, except exchanges, waits, and items of several results. A node that cannot be followed
    raises Lost.
    It runs once, on the fake tensors that the tracer stored of its inputs. The rules of operators
    are in one table, `dims/operators.py`; an operator that is not there is decomposed as torch
    does, or raises Lost. A node that draws random numbers, or calls a function that is not torch's,
    raises Lost.
    Sizes are numbers, or numbers that stand for products of symbols; any other raises Lost.
    `is_movement` names the operators that only move data; regions of attention have no others.
    A value has the indices of a factor all, in a dimension, or one, which `picks` names, as in a
    loop over experts. Values of several indices that meet close the factor; those of all, joined in
    order, have it again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.dims.arguments import dim_of, moved, one_index, operator_name
from moe_compile.dims.factors import Dims, Factor, Lost, SizeNumbers, flat, regroup, size_of
from moe_compile.dims.flow import Call, Flow, Followed, Notes, Picked, Picks
from moe_compile.dims.operators import UNIFORM, follow_operator, is_known
from moe_compile.dims.operators import operator_name as aten_name
from moe_compile.dims.record import UNTRACEABLE, Operator, Recorder
from moe_compile.graph.dependence import written_arguments
from moe_compile.graph.inner_graphs import is_higher_order
from moe_compile.graph.memory import tensors_in
from moe_compile.graph.modes import Mode, running_under
from moe_compile.graph.observation import call, draws_by_schema, fake_mode_of, running_on
from moe_compile.graph.query import (
    input_splits,
    is_all_to_all,
    is_launch,
    is_wait,
    operator_at,
    output_splits,
    tensor_of,
    value_of,
)

FORMS: Final = frozenset(
    {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"}
)
"""Operators that regroup dimensions in order: the sizes of the result say how."""

COPIES: Final = frozenset({"contiguous", "clone"})
SWAPS: Final = frozenset({"transpose", "swapaxes"})
SHIFTS: Final = frozenset({"movedim", "moveaxis"})
CUTS: Final = frozenset({"split", "chunk"})
OTHERS: Final = frozenset({"permute", "expand", "repeat_interleave", "cat"})
NO_SYMBOLS: Final = SizeNumbers()
NOT_FOLLOWED: Final = "is an operator for which megamoe has no rule that traces dimensions"
AS_ONE: Final = {
    "scaled_dot_product_attention": torch.ops.aten.scaled_dot_product_attention.default
}
"""Functions that torch decomposes by device, and that are followed as one operator."""


def run_node(
    flow: Flow, known: Callable[[fx.Node], Followed], instead: Mapping[str, Any] | None = None
) -> Any:
    """Return the result of `flow.node`, with its tensors in `flow`; `known` gives its inputs.

    With `instead` the node is given these arguments, all by name.
    """
    node = flow.node
    fake = fake_mode_of([value_of(source) for source in node.all_input_nodes])
    if fake is None or not _may_run(node):
        raise flow.lost(NOT_FOLLOWED)
    given: dict[fx.Node, Any] = {}

    def value(read: fx.Node) -> Any:
        if read not in given:
            found = value_of(read)
            if isinstance(found, torch.Tensor):
                followed = known(read)
                found = followed.tensor
                flow.give(followed)
            given[read] = found
        return given[read]

    recorder = recorder_of(flow)
    args, kwargs = (node.args, node.kwargs) if instead is None else ((), dict(instead))
    try:
        with running_on(fake):
            args, kwargs = fx.node.map_arg((args, kwargs), value)
            if (func := AS_ONE.get(operator_name(node))) is not None:
                made = value_of(node).detach()
                follow_one(flow, Operator(node, func, args, kwargs, made))
                return made
            with recorder:
                made = recorder.run(node, lambda: call(node, args, kwargs))
    except UNTRACEABLE as error:
        raise Lost(f"{operator_at(node)} fails when megamoe traces it: {error}") from error
    return args[0] if made is None else made  # `x[...] = y`


def _may_run(node: fx.Node) -> bool:
    if is_launch(node) or is_higher_order(node):
        return False
    module = str(getattr(node.target, "__module__", "torch")).partition(".")[0]
    return node.op == "call_method" or module in ("torch", operator.add.__module__, "builtins")


def recorder_of(flow: Flow) -> Recorder:
    """Return the recorder that follows factors through the operators that run under it."""
    return Recorder(lambda one: follow_one(flow, one), is_known)


def follow_one(flow: Flow, one: Operator) -> None:
    """Follow factors through an operator that makes tensors of tensors."""
    is_one = one.func in AS_ONE.values()  # whether it draws is asked elsewhere
    if not is_one and draws_by_schema(one.func, one.args, one.kwargs):
        raise flow.lost("draws random numbers")
    if not one.inputs:
        if aten_name(one.func) not in UNIFORM:  # its values differ by place, as of `arange`
            flow.close(dim for tensor in one.outputs for dim in flow.dims(tensor))
        return
    if not one.outputs:
        return
    inherited = [pair for tensor in one.inputs for pair in flow.of(tensor).picked]
    picked = [list(inherited) for _ in one.outputs]
    follow_operator(Call(one.node, one.func, one.args, one.kwargs, one.out, flow, picked))


def is_even_exchange(node: fx.Node) -> bool:
    """Whether the node is an all-to-all that gives every rank as many rows, known beforehand."""
    if not is_all_to_all(node):
        return False
    sizes = [*output_splits(node), *input_splits(node)]
    return bool(sizes) and all(isinstance(s, int) and s == sizes[0] for s in sizes)


def is_movement(node: fx.Node) -> bool:
    """Whether the node moves data, within a rank or by an even exchange, and nothing else."""
    if is_wait(node):
        source = node.all_input_nodes[0]
        return is_wait(source) or is_all_to_all(source)
    if node.target is operator.getitem:
        source = node.all_input_nodes[0]
        return operator_name(source) in CUTS and isinstance(node.args[1], int)
    moves = operator_name(node) in COPIES | SWAPS | SHIFTS | CUTS | OTHERS
    return is_form(node) or is_all_to_all(node) or moves


def is_form(node: fx.Node) -> bool:
    """Whether the node regroups dimensions, and keeps elements: `x.view(dtype)` makes others."""
    if operator_name(node) not in FORMS:
        return False
    made, given = tensor_of(node), tensor_of(node.all_input_nodes[0])
    return made is not None and given is not None and made.dtype is given.dtype


def sizes_of(node: fx.Node, numbers: SizeNumbers = NO_SYMBOLS) -> list[int]:
    """Return the sizes of the tensor the node makes; raises Lost when one is not known."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        raise Lost("a size is not known at compile time")
    return [numbers.product_of(size) for size in value.shape]


def cut_dim(node: fx.Node) -> int:
    """Return the dimension a split, a chunk or a concatenation works along, from the left."""
    made = pytree.tree_leaves(value_of(node))
    if not made or not isinstance(made[0], torch.Tensor):
        raise Lost(f"{operator_at(node)} must return tensors, and does not")
    return dim_of(node, made[0].dim(), default=0)


class Tracker(Notes):
    """The factors of the values of one region."""

    def __init__(self, modes: Mapping[fx.Node, Mode], numbers: SizeNumbers = NO_SYMBOLS) -> None:
        """Start with no value known; `numbers` stand for sizes that are symbols.

        `modes` are those that each node of the graph runs under.
        """
        super().__init__()
        self._modes = modes
        self.numbers = numbers
        self._dims: dict[fx.Node, Dims] = {}
        self._picked: dict[fx.Node, Picked] = {}
        self._several: dict[fx.Node, list[tuple[Dims | None, Picked]]] = {}
        """Node that makes several tensors -> factors of each, and the indices it was made from."""
        self._started: dict[fx.Node, None] = {}
        self.sent: dict[fx.Node, list[Factor]] = {}
        """Exchange -> the factors that said which rank a row went to."""
        self.source: dict[fx.Node, Factor] = {}
        """Exchange -> the factor that says which rank a row came from."""
        self.terms: dict[fx.Node, Dims] = {}
        """Loss -> the factors of the terms that it adds up."""

    def __contains__(self, node: fx.Node) -> bool:
        """Whether the factors of `node` are known."""
        return node in self._dims

    def sizes_of(self, node: fx.Node) -> list[int]:
        """Return the sizes of the tensor the node makes; raises Lost when one is not known."""
        return sizes_of(node, self.numbers)

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs of `node`, without those that give sizes and bounds of a movement."""
        is_told = is_movement(node) or node.target in (operator.getitem, operator.setitem)
        written = node.args[2] if node.target is operator.setitem else None
        return [
            one
            for one in node.all_input_nodes
            if one is written or not (is_told and self.numbers.tells_sizes(one))
        ]

    def start(self, node: fx.Node) -> None:
        """Give every dimension of `node` a factor of its own."""
        self._dims[node] = [[Factor(size)] for size in self.sizes_of(node)]
        self._started[node] = None

    def put(self, node: fx.Node, dims: Dims) -> None:
        """Set the factors of `node`; raises Lost unless its sizes agree."""
        if tensor_of(node) is not None and [size_of(dim) for dim in dims] != self.sizes_of(node):
            raise Lost(
                f"{operator_at(node)} has sizes that differ from those that megamoe's rule "
                "for it gives"
            )
        self._dims[node] = dims

    def started(self) -> tuple[fx.Node, ...]:
        """Return every value that tracking began at."""
        return tuple(self._started)

    def dims(self, node: fx.Node) -> Dims:
        """Return the factors of `node`; of one that cuts, those of its input."""
        if node not in self:
            raise Lost(f"the dimensions of {operator_at(node)} were not traced")
        return [flat(dim) for dim in self._dims[node]]

    def pieces_of(self, node: fx.Node) -> list[Dims]:
        """Return the factors of each tensor that `node` makes."""
        return [[flat(dim) for dim in dims or ()] for dims, _ in self._several[node]]

    def picks(self, node: fx.Node) -> Picks:
        """Return the indices that `node` was made from."""
        return self.settled(node, self._picked.get(node, []))

    def result_of_attention(self, core: fx.Node, query: fx.Node, value: fx.Node) -> None:
        """Give the result of attention the query's factors but for the last dimension."""
        self._dims[core] = [*self.dims(query)[:-1], [Factor(self.sizes_of(value)[-1])]]

    def begin(self, node: fx.Node, sources: Sequence[fx.Node]) -> None:
        """Begin at those of `sources` that are not known; give `node` the indices of all."""
        for source in sources:
            if source not in self:
                self.start(source)
        self._picked[node] = [pair for source in sources for pair in self.picks(source).items()]
        self.picks(node)  # closes factors whose indices meet here

    def follow(self, node: fx.Node, *, may_write: bool = False) -> None:
        """Find the factors of `node` from those of its inputs; those from outside begin here."""
        sources = self.operands(node)
        if is_all_to_all(node) or is_wait(node):
            self.begin(node, sources)
            self.put(node, self._exchanged(node) if is_all_to_all(node) else self.dims(moved(node)))
        elif node.target is operator.getitem and node.args[0] in self._several:
            self._take_piece(node)
        elif written_arguments(node) and not may_write:
            raise Lost(f"{operator_at(node)} writes in place")
        else:
            self.run(node, sources)

    def run(self, node: fx.Node, sources: Sequence[fx.Node]) -> None:
        """Follow factors through a node by the operators that it runs."""
        made, flow = self.made_by(node, sources)
        each = [flow.of(tensor) for tensor in tensors_in(made)]
        whole = each[0]
        if not isinstance(made, torch.Tensor):
            self.put_several(node, [one.dims for one in each], [one.picked for one in each])
            wholes = {id(w): w for one in each if (w := flow.whole_of.get(id(one.tensor)))}
            whole = wholes.popitem()[1] if len(wholes) == 1 else whole
        if whole.dims is None:
            raise Lost(f"{operator_at(node)} returns a tensor whose dimensions could not be traced")
        self.put(node, whole.dims)
        is_taken = operator_name(node) in ("getitem", "select") and one_index(node) is not None
        self._picked[node] = self._taken(node, whole.picked, sources, is_taken)

    def made_by(
        self, node: fx.Node, sources: Sequence[fx.Node], instead: dict[str, Any] | None = None
    ) -> tuple[Any, Flow]:
        """Return the result of `node`, and the factors of its tensors.

        With `instead` the node is given these arguments, all by name.
        """
        if any(tensor_of(one) is None for one in sources):
            raise Lost(
                f"{operator_at(node)} must have sizes that are known at compile time, and "
                "one is not"
            )
        for source in sources:
            if source not in self:
                self.start(source)
        flow = Flow(node, self.numbers, self)
        with running_under(self._modes[node]):  # autocast chooses the operators that run
            made = run_node(flow, self._given, instead)
        if not tensors_in(made):
            raise Lost(f"{operator_at(node)} returns no tensor")
        return made, flow

    def put_several(
        self, node: fx.Node, each: Sequence[Dims | None], picked: Sequence[Picked] | None = None
    ) -> None:
        """Set the factors of each tensor that `node` makes."""
        picked = [[] for _ in each] if picked is None else picked
        self._several[node] = list(zip(each, picked, strict=True))

    def _given(self, node: fx.Node) -> Followed:
        tensor, picked = tensor_of(node), list(self.picks(node).items())
        assert tensor is not None
        origin = node if node in self._started else None
        return Followed(tensor.detach(), self.dims(node), picked, origin)

    def _taken(
        self, node: fx.Node, picked: Picked, sources: Sequence[fx.Node], is_taken: bool
    ) -> Picked:
        """Return the indices of `node`; closes its own unless another node can take them for it."""
        settled = self.settled(node, picked)
        given = {factor for source in sources for factor in self.picks(source)}
        if not is_taken:
            self.closed += [(node, [factor]) for factor in settled if factor not in given]
        return list(settled.items())

    def _take_piece(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node)
        if not isinstance(index, int):
            raise Lost(
                f"{operator_at(node)} takes one of several results by an index that must be "
                "a Python integer, and is not"
            )
        dims, picked = self._several[source][index]
        if dims is None:
            raise Lost(f"the dimensions of {operator_at(node)} could not be traced")
        self.put(node, dims)
        is_taken = operator_name(source) in CUTS | {"unbind"}
        self._picked[node] = self._taken(node, picked, [source], is_taken)

    def _exchanged(self, node: fx.Node) -> Dims:
        if not is_even_exchange(node):
            raise Lost("an exchange must send equally much to every rank, and one does not")
        dims, num_ranks = self.dims(moved(node)), len(output_splits(node))
        sent, rest = regroup(dims[0], [num_ranks, size_of(dims[0]) // num_ranks])
        self.sent[node], self.source[node] = sent, Factor(num_ranks)
        return [[self.source[node], *rest], *dims[1:]]
