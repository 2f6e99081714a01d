"""Quantise rows for products in eight bits in the kernel that makes the rows, on a GPU.

Contract
    Requires  FUNCTIONAL.
    Keeps     every node and its value. `quantize_rows` moves right behind the rows, and Inductor
              lowers it to operators that it fuses with what makes them:

        a        = max(|x|) of a block, but at least its least maximum
        payload  = element(x * (largest / a))
        scale    = a / largest

    Payload and scales have the bytes of `moe_compile.ops.product_formats`, whatever NaN a NaN is.
    x is rounded to the type of the rows first. Inductor keeps what it fuses in float32 registers:
    without that, the payload would be of other numbers than those kept for the backward pass.
    Rows whose blocks do not fill a row, and all rows where torch lacks the means, keep the kernel.

Inductor fuses a maximum over blocks with what makes the rows if both count elements alike, block by
block. So rows that nothing else has read yet are made in blocks, and others see them as rows. It
divides a number of elements by another only if both are multiples of one symbol, so a number of
rows that is a sum gets a symbol of its own:

    u0 + u1 rows of 256 columns, blocks of 128  ->  u9 = u0 + u1; 2 * u9 blocks

And it fuses only what has hints of its size: `moe_compile/codegen.py` gives them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import sympy
import torch
import torch.fx as fx
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import FloorDiv, ModularIndexing
from torch.utils._sympy.numbers import int_oo

from moe_compile.graph.precedence import is_view
from moe_compile.graph.query import argument_of, tensor_of
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.ops.product_formats import ELEMENTS, Element, format_of
from moe_compile.ops.quantized_rows import has_kernel
from moe_compile.ops.scaled_products import QUANTIZE_ROWS
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass


@dataclass(frozen=True)
class QuantizeWhereMade(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "quantize_where_made"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    commutes_with: ClassVar[frozenset[str]] = frozenset({"copy_fills"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Move each node, and have Inductor lower them."""
        del state
        found = [node for node in graph.nodes if is_quantised_on_gpu(node)]
        chosen = [node for node in found if _blocks(node)]
        detail = "a kernel of megamoe runs it already"
        if chosen and not teach_inductor():
            chosen, detail = [], f"{detail}: this torch cannot divide exactly in Inductor's kernels"
        for node in chosen:
            node.all_input_nodes[0].append(node)
        skipped = tuple(
            Verdict(candidate=node.name, reason=Reason.ALREADY_DONE, detail=detail)
            for node in found
            if node not in chosen
        )
        applied = tuple(node.name for node in chosen)
        return PassReport(pass_name=self.name, applied=applied, skipped=skipped)


def is_quantised_on_gpu(node: fx.Node) -> bool:
    """Whether the node quantises rows, for a product, on a GPU."""
    if node.target is not QUANTIZE_ROWS:
        return False
    rows = tensor_of(node.all_input_nodes[0])
    return rows is not None and has_kernel(rows.device)


def is_made_in_blocks(rows: fx.Node) -> bool:
    """Whether the kernel that quantises some rows makes them, and writes them for other readers."""
    return any(is_quantised_on_gpu(reader) and _blocks(reader) for reader in rows.users)


def _blocks(quantised: fx.Node) -> int:
    """Return the blocks of a row that is quantised; 0 where they do not fill it."""
    rows = tensor_of(quantised.all_input_nodes[0])
    assert rows is not None
    return blocks_that_fill(int(rows.shape[1]), argument_of(quantised, 1, "recipe"))


def blocks_that_fill(width: int, recipe: str) -> int:
    """Return how many blocks a row of `width` columns consists of; 0 where they do not fill it."""
    chosen = format_of(recipe)
    if not chosen.has_kernel:
        return 0
    block = chosen.row_block or width
    return width // block if width and width % block == 0 else 0


@functools.cache
def teach_inductor() -> bool:
    """Register the lowering; return whether this torch has the means."""
    try:
        ir: Any = importlib.import_module("torch._inductor.ir")
        lowering: Any = importlib.import_module("torch._inductor.lowering")
        virtualized: Any = importlib.import_module("torch._inductor.virtualized")
        handler: Any = importlib.import_module("torch._inductor.ops_handler").OpsHandler
        hints: Any = importlib.import_module("torch._inductor.runtime.hints").ReductionHint
        has_means = hasattr(handler, "div_rn") and issubclass(ir.AssertScalar, ir.ExternKernel)
        by_kernel = lowering.fallback_handler(QUANTIZE_ROWS, add_to_fallback_set=False)
    except (ImportError, AttributeError):
        return False
    if not has_means:  # `/` is off by up to two units in the last place
        return False
    counted = _counter(ir, virtualized)

    def lower(rows: Any, recipe: str, element: str = "e4m3") -> Any:
        num_rows, width = rows.get_size()
        blocks = blocks_that_fill(int(width), recipe)
        if not (blocks and has_kernel(rows.get_device())) or virtualized.V.graph.cpp_wrapper:
            return by_kernel(rows, recipe, element)
        make = _Blocks(
            ir=ir,
            ops=virtualized.ops,
            hint=hints.INNER,
            device=rows.get_device(),
            number=counted(num_rows) * blocks,
            size=int(width) // blocks,
            element=ELEMENTS[element],
        )
        is_read = _is_read_before(virtualized.V.graph)
        load = make.loader_of(rows, blocks, is_read=is_read)
        payload, scales = make.quantised(load, rows.get_dtype())
        is_whole = format_of(recipe).row_block is None
        of_rows = [num_rows] if is_whole else [num_rows, blocks]
        return [_as(ir, payload, [num_rows, width]), _as(ir, scales, of_rows)]

    lowering.register_lowering(QUANTIZE_ROWS, type_promotion_kind=None)(lower)
    return True


def _is_read_before(graph: Any) -> bool:
    """Whether Inductor has lowered another reader of the rows than the one it is at.

    Rows that are a slice may have no other reader of what they are a slice of, now or later.
    """
    quantised = graph.current_node
    rows = quantised.all_input_nodes[0]
    if is_view(rows) and len(rows.all_input_nodes[0].users) > 1:  # the others are sizes
        return True
    return any(reader in graph.env for reader in rows.users if reader is not quantised)


def _as(ir: Any, made: Any, size: Sequence[Any]) -> Any:
    """Return contiguous memory in another size of as many elements."""
    made.realize()
    storage, layout = ir.as_storage_and_layout(made)
    strides = ir.FlexibleLayout.contiguous_strides(size)
    seen = ir.FixedLayout(layout.device, layout.dtype, list(size), strides, layout.offset)
    return ir.TensorBox(ir.ReinterpretView(data=storage, layout=seen))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Blocks:
    """Blocks of rows in Inductor's form: `number` of `size` elements."""

    ir: Any
    ops: Any
    hint: Any
    """Of a reduction along memory."""
    device: torch.device
    number: Any
    size: int
    element: Element

    def loader_of(
        self, rows: Any, in_a_row: int, *, is_read: bool
    ) -> Callable[[Sequence[Any]], Any]:
        """Return what loads an element of a block; rows that nothing reads yet are made in blocks.

        What Inductor may have made of them so far has no reader then, and is dropped.
        """
        maker, first = (None, 0) if is_read else self._maker_of(rows)
        load_rows = (maker or rows).make_loader()

        def element_at(place: Sequence[Any]) -> Any:
            row, block = FloorDiv(place[0], in_a_row), ModularIndexing(place[0], 1, in_a_row)
            return load_rows([row + first, block * self.size + place[1]])

        if maker is None:
            rows.realize()
            load_rows = rows.make_loader()
            return element_at
        made = self._pointwise(rows.get_dtype(), element_at, [self.number, self.size])
        rows.data = _as(self.ir, made, rows.get_size()).data  # as readers from here on see it
        loader: Callable[[Sequence[Any]], Any] = made.make_loader()
        return loader

    def _maker_of(self, rows: Any) -> tuple[Any, int]:
        """Return what has the values of rows, if a kernel is still to make them, and their first.

        The first is 0 but for rows that are a slice of what Inductor has begun to make.
        """
        box, first = rows.data, 0
        base: Any = getattr(box, "data", None)
        if isinstance(box, self.ir.ReinterpretView):
            base, seen = base.data, box.layout
            made = getattr(base, "layout", None)
            if made is None or [*seen.stride] != [*made.stride]:
                return None, 0
            first, rest = divmod(seen.offset - made.offset, seen.stride[0])
            if rest != 0:
                return None, 0
        elif isinstance(box, self.ir.BaseView):
            is_to_make = isinstance(getattr(base, "data", None), self.ir.Pointwise)
            return (rows if is_to_make else None), 0
        maker = base.data if isinstance(base, self.ir.ComputedBuffer) else base
        return (maker if isinstance(maker, self.ir.Pointwise) else None), first

    def quantised(
        self, load: Callable[[Sequence[Any]], Any], dtype: torch.dtype
    ) -> tuple[Any, Any]:
        """Return the payload `[number, size]` and the scales `[number]`."""
        ops = self.ops

        def value_at(place: Sequence[Any]) -> Any:
            rounded = ops.to_dtype(load(place), dtype, use_compute_types=False)
            return ops.to_dtype(rounded, torch.float32)

        largest = self.ir.Reduction.create(
            device=self.device,
            dst_dtype=torch.float32,
            src_dtype=torch.float32,
            inner_fn=lambda place, column: ops.abs(value_at([*place, *column])),
            ranges=[self.number],
            reduction_ranges=[self.size],
            reduction_type="max",
            reduction_hint=self.hint,
        )
        largest.realize()
        load_largest = largest.make_loader()

        def constant(value: float) -> Any:
            return ops.constant(value, torch.float32)

        def maximum_at(place: Sequence[Any]) -> Any:
            return ops.maximum(load_largest(place[:1]), constant(self.element.least_maximum))

        def payload_at(place: Sequence[Any]) -> Any:
            factor = ops.div_rn(constant(self.element.largest), maximum_at(place))
            return ops.to_dtype(ops.mul(value_at(place), factor), self.element.dtype, torch.float32)

        def scale_at(place: Sequence[Any]) -> Any:
            return ops.div_rn(maximum_at(place), constant(self.element.largest))

        payload = self._pointwise(self.element.dtype, payload_at, [self.number, self.size])
        return payload, self._pointwise(torch.float32, scale_at, [self.number])

    def _pointwise(
        self, dtype: torch.dtype, at: Callable[[Sequence[Any]], Any], ranges: Sequence[Any]
    ) -> Any:
        made = self.ir.Pointwise.create(
            device=self.device, dtype=dtype, inner_fn=at, ranges=list(ranges)
        )
        made.realize()
        return made


def _counter(ir: Any, virtualized: Any) -> Callable[[Any], Any]:
    """Return a function that gives a number of rows as a number or as one symbol."""

    class NamedSize(ir.AssertScalar):
        """A symbol for a sum, written ahead of what uses it."""

        def __init__(self, symbol: sympy.Symbol, size: sympy.Expr) -> None:
            super().__init__(size, "")
            self._symbol = symbol

        def get_unbacked_symbol_defs(self) -> OrderedSet[sympy.Symbol]:
            return OrderedSet([self._symbol])

        def codegen(self, wrapper: Any) -> None:
            wrapper.writeline(f"{self._symbol} = {wrapper.codegen_python_sizevar(self.scalar)}")

    known: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def counted(size: Any) -> Any:
        graph = virtualized.V.graph
        size = graph.sizevars.simplify(size)
        symbols = known.setdefault(graph, {})
        if size.is_number or size.is_symbol:
            return size
        if size not in symbols:
            hint = graph.sizevars.optimization_hint(size)
            env = graph.sizevars.shape_env
            with env.ignore_fresh_unbacked_symbols():
                symbol = env.create_unbacked_symint().node.expr
            env.constrain_symbol_range(symbol, 0, int_oo)
            env.var_to_hint_override[symbol] = hint
            named = NamedSize(symbol, size)
            named.name = graph.register_buffer(named)
            graph.register_operation(named)
            symbols[size] = symbol
        return symbols[size]

    return counted
