"""Keep out of CUDA graphs what they cannot hold: sizes of the step, and addresses that move.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value and the order of nodes; adds operators that compute nothing. Without CUDA
              graphs it does nothing.

Inductor divides a graph into parts that are captured and parts that are not. By itself it
    captures a kernel whose size the host reads in each step, and records it again for each size;
    takes a weight for a tensor at a fixed address, though FSDP2 gathers it to another one in each
    step, and records the part again for each address;
    takes all inputs of the program for such tensors in the backward graph, activations too.

So the pass names the sizes, by `step_sizes` at the end of the graph: Inductor's setting
`cudagraph_unsafe_unbacked_ops` keeps kernels with these out. A kernel may read rows of such a
number and make a result of another size, and mention no number: `of_step` has it mention one.
Kernels read inputs that may move by another name, of `moving_input` at the head of the graph. Each
replay copies them into the graph's memory. The program's own tensor keeps its name: it, or a view
of it, is what the forward graph saves for the backward, not the copy, so that FSDP2 can free it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
import torch.fx as fx
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet

from moe_compile.graph.dependence import written_arguments
from moe_compile.graph.edit import Emitter, erase_unused, read_instead
from moe_compile.graph.precedence import is_view
from moe_compile.graph.query import ends_transfer, overload_name, starts_transfer, tensor_of
from moe_compile.journal.entries import PassReport
from moe_compile.ops.captures import MOVING_INPUT, OF_STEP, STEP_SIZES
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass


@dataclass(frozen=True)
class BoundCaptures(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "bound_captures"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    commutes_with: ClassVar[frozenset[str]] = frozenset({"size_attention"})
    is_needed: ClassVar[bool] = True

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Mark sizes and inputs, where parts of the graph are to be captured."""
        if not state.is_captured:
            return PassReport(pass_name=self.name)
        moving = [n for n in _moving(graph, state) if any(u.op != "output" for u in n.users)]
        sizes = _sizes(graph)
        readers = _mention(graph, sizes)
        if moving:
            _rename(moving)
        if sizes:
            nodes = list(dict.fromkeys(sizes.values()))
            Emitter(graph.output_node()).call(STEP_SIZES, nodes).meta["val"] = None
        return PassReport(pass_name=self.name, applied=tuple(n.name for n in (*moving, *readers)))


def _moving(graph: fx.Graph, state: CompileState) -> list[fx.Node]:
    """Return inputs that torch takes for ones at a fixed address, and that may move.

    What the graph writes into is left: no read of another name would be held before the write.
    """
    inputs = [n for n in graph.find_nodes(op="placeholder") if tensor_of(n) is not None]
    written = {written for node in graph.nodes for written in written_arguments(node)}
    taken = [n for n in inputs if n.name.startswith("primals_") and _is_on_device(n)]
    candidates = [node for node in taken if node not in written]
    if state.is_backward:
        return [n for n in candidates if n.name not in state.steady_names]
    if len(inputs) != state.num_inputs:  # no knowing which is which
        return candidates
    state.steady_names = {inputs[place].name for place in state.steady_inputs}
    gathered = {inputs[place] for place in state.gathered_inputs}
    return [n for n in candidates if n in gathered]


def _is_on_device(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.device.type != "cpu"


def _mention(graph: fx.Graph, sizes: Mapping[sympy.Symbol, fx.Node]) -> list[fx.Node]:
    """Have operators of known sizes that read rows of another number mention a size of these.

    A matrix product that reads rows made in the graph is left: Inductor's node of a product has the
    sizes of what it reads, and would read a copy of the rows.
    """
    of_step = _rows_of_step(graph, sizes)
    marked = []
    for node in graph.nodes:
        rows = [n for n in node.all_input_nodes if n in of_step]
        if not rows or node in of_step or node.op == "output" or _is_outside(node):
            continue
        if overload_name(node).endswith("mm") and any(map(_is_made_here, rows)):
            continue
        marked.append((node, rows))
    for node, rows in marked:
        for read in rows:
            here = Emitter(node).call(OF_STEP, read, of_step[read])
            here.meta["val"] = read.meta["val"]
            read_instead(node, read, here)
    return [node for node, _ in marked]


def _rows_of_step(graph: fx.Graph, sizes: Mapping[sympy.Symbol, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return what is as long as the host reads, or looks at it, each with a node of one size."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if own := _symbols(node) & sizes.keys():
            found[node] = sizes[min(own, key=str)]
        elif is_view(node) and node.args[0] in found:
            found[node] = found[node.args[0]]
    return found


def _is_made_here(node: fx.Node) -> bool:
    """Return whether rows are no input of the graph, views looked through."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node.op != "placeholder"


def _is_outside(node: fx.Node) -> bool:
    """Return whether no part captures a node in any case, or it is no work."""
    return starts_transfer(node) or ends_transfer(node) or tensor_of(node) is None


def _symbols(node: fx.Node) -> set[sympy.Symbol]:
    """Return the symbols in the sizes of what a node makes."""
    values = pytree.tree_leaves(node.meta.get("val"))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sizes = [n for t in tensors for n in (*t.shape, *t.stride(), t.storage_offset())]
    return {s for n in sizes if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}


def _rename(moving: Sequence[fx.Node]) -> None:
    """Have all but the output of the graph read `moving`, and views of them, by another name."""
    head = moving[-1]
    while head.next.op == "placeholder":
        head = head.next
    emit, names = Emitter(head.next), dict[fx.Node, fx.Node]()
    for node in moving:
        names[node] = emit.call(MOVING_INPUT, node)
    for node in list(head.graph.nodes):
        if is_view(node) and node.args[0] in names and node.target is not MOVING_INPUT:
            names[node] = Emitter(node).copy(node, names)
    known = {*names, *names.values()}
    for node, here in names.items():
        here.meta["val"] = node.meta["val"]
        for reader in list(node.users):
            if reader.op != "output" and reader not in known:
                read_instead(reader, node, here)
    erase_unused(node for node in names if node.op != "placeholder")


def _sizes(graph: fx.Graph) -> dict[sympy.Symbol, fx.Node]:
    """Return each symbol that the host reads, with the first node that has it."""
    found: dict[sympy.Symbol, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "output" or not isinstance(value, torch.SymInt):
            continue
        shapes = value.node.shape_env
        for symbol in sorted(value.node.expr.free_symbols, key=str):
            if shapes.is_unbacked_symint(symbol):
                found.setdefault(symbol, node)
    return found


@functools.cache
def write_step_sizes() -> bool:
    """Have Inductor know the sizes by the operators; return whether this torch has the means.

    The node of `step_sizes` says that it defines them, behind those that do: so the setting finds
    them, in the backward graph too, where they are inputs. `of_step` becomes part of its reader.
    """
    try:
        ir = importlib.import_module("torch._inductor.ir")
        lowering = importlib.import_module("torch._inductor.lowering")
        virtualized = importlib.import_module("torch._inductor.virtualized")
        lower_sizes = _lowering_of_sizes(ir.FallbackKernel, ir.NoneLayout)
        lower_rows = _lowering_of_rows(ir.Pointwise, virtualized.ops)
        lower_input = _lowering_of_inputs(ir.FallbackKernel, ir.TensorBox, virtualized)
    except (ImportError, AttributeError):
        return False
    lowering.register_lowering(STEP_SIZES, type_promotion_kind=None)(lower_sizes)
    lowering.register_lowering(OF_STEP, type_promotion_kind=None)(lower_rows)
    lowering.register_lowering(MOVING_INPUT, type_promotion_kind=None)(lower_input)
    return True


def _lowering_of_inputs(kernel: Any, boxed: Any, virtualized: Any) -> Callable[..., Any]:
    class MovingInput(kernel):
        """Another name of an input, which nothing takes the memory of.

        As an alias it would be the input for Inductor: parts would be given both.
        """

        def __init__(self, given: Any) -> None:
            layout = given.get_layout()
            super().__init__(layout, MOVING_INPUT, (given,), (), lambda tensors, _: (tensors, {}))
            self.alias_names.clear()
            virtualized.V.graph.never_reuse_buffers.add(self.get_name())

        def codegen(self, wrapper: Any) -> None:
            (given,) = (tensor.codegen_reference() for tensor in self.inputs)
            wrapper.writeline(f"{self.get_name()} = {given}")

    def lower(given: Any) -> Any:
        return boxed.create(MovingInput(kernel.unwrap_storage_for_input(given)))

    return lower


def _lowering_of_sizes(kernel: Any, no_layout: Any) -> Callable[..., None]:
    class StepSizes(kernel):
        """Names of sizes."""

        def __init__(self, symbols: OrderedSet[sympy.Symbol]) -> None:
            self._symbols = symbols  # first: the base registers itself
            layout = no_layout(device=torch.device("cpu"))
            super().__init__(layout, STEP_SIZES, (), (), lambda *_: (([],), {}))

        def get_unbacked_symbol_defs(self) -> OrderedSet[sympy.Symbol]:
            return self._symbols

        def has_side_effects(self) -> bool:
            return True

        def codegen(self, wrapper: Any) -> None:
            pass

    def lower(sizes: Sequence[Any]) -> None:
        exprs = [size for size in sizes if isinstance(size, sympy.Expr)]
        StepSizes(OrderedSet(s for e in exprs for s in sorted(e.free_symbols, key=str)))

    return lower


def _lowering_of_rows(pointwise: Any, ops: Any) -> Callable[..., Any]:
    def lower(rows: Any, size: Any) -> Any:
        load, symbol = rows.make_loader(), min(size.free_symbols, key=str)

        def of_step(index: Any) -> Any:
            ops.index_expr(symbol, torch.int64)
            return load(index)

        device, dtype, ranges = rows.get_device(), rows.get_dtype(), list(rows.get_size())
        return pointwise.create(device=device, dtype=dtype, inner_fn=of_step, ranges=ranges)

    return lower
