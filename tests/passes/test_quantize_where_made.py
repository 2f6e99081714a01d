"""Rows for products are quantised in the kernel that makes them, and priced so.

tests/benchmarks/test_cuda_code.py runs that kernel in Triton's interpreter.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.fx as fx

from moe_compile.cost.amounts import amounts_of
from moe_compile.cost.sizes import NominalSizes
from moe_compile.journal.reasons import Reason
from moe_compile.ops.scaled_products import QUANTIZE_ROWS
from passes import quantize_where_made
from passes.quantize_where_made import QuantizeWhereMade

ATEN = torch.ops.aten
DETAIL = "a kernel of megamoe runs it already"


def rows_read_twice(width=256):
    """Return a graph in which something else reads rows before they are quantised."""
    graph, value = fx.Graph(), torch.empty(4, width, dtype=torch.bfloat16)
    gate = graph.placeholder("gate")
    rows = graph.call_function(ATEN.relu.default, (gate,))
    other = graph.call_function(ATEN.mm.default, (rows, rows))
    quantised = graph.call_function(QUANTIZE_ROWS, (rows, "blockwise"))
    for node in (gate, rows, other):
        node.meta["val"] = value
    quantised.meta["val"] = QUANTIZE_ROWS(value, "blockwise")
    graph.output((other, quantised))
    return graph, rows, quantised


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(quantize_where_made, "has_kernel", lambda device: True)


def test_rows_are_quantised_before_anything_else_reads_them(on_a_gpu):
    graph, rows, quantised = rows_read_twice()
    report = QuantizeWhereMade().run(graph, None)
    graph.lint()
    assert report.applied == (quantised.name,) and rows.next is quantised


def test_rows_that_blocks_do_not_fill_and_rows_without_lowering_keep_the_kernel(
    on_a_gpu, monkeypatch
):
    graph, _, quantised = rows_read_twice(192)
    (verdict,) = QuantizeWhereMade().run(graph, None).skipped
    assert verdict.why == f"{Reason.ALREADY_DONE.value} ({DETAIL})"
    assert quantised.prev.target is ATEN.mm.default
    monkeypatch.setattr(quantize_where_made, "teach_inductor", lambda: False)
    (verdict,) = QuantizeWhereMade().run(rows_read_twice()[0], None).skipped
    assert DETAIL in verdict.why and "torch" in verdict.why


@pytest.mark.parametrize("others_read", [False, True])
def test_rows_that_are_a_view_are_read_before_if_another_reads_what_they_are_a_view_of(others_read):
    """Others that read its size read no rows."""
    graph = fx.Graph()
    size, gate = graph.placeholder("size"), graph.placeholder("gate")
    rows = graph.call_function(ATEN.expand.default, (gate, [size, 256]))
    quantised = graph.call_function(QUANTIZE_ROWS, (rows, "blockwise"))
    read = [size, gate] if others_read else [size]
    graph.output((quantised, *(graph.call_function(ATEN.relu.default, (node,)) for node in read)))
    lowering = SimpleNamespace(current_node=quantised, env={size: None, gate: None, rows: None})
    assert quantize_where_made._is_read_before(lowering) is others_read


def test_on_a_cpu_the_operator_is_left():
    graph, *_ = rows_read_twice()
    report = QuantizeWhereMade().run(graph, None)
    assert not report.applied and not report.skipped


def test_the_price_of_quantising_is_what_it_writes():
    """Rows are written for another reader, and not read for the payload and the scales."""
    graph, rows, quantised = rows_read_twice()
    amounts = amounts_of(quantised, NominalSizes({}))
    assert amounts.nbytes == amounts.written == 4 * 256 + 4 * 2 * 4
    made = amounts_of(rows, NominalSizes({}))
    assert made.written == 4 * 256 * 2
    quantised.prev.replace_all_uses_with(quantised)
    graph.erase_node(quantised.prev)
    assert amounts_of(rows, NominalSizes({})).written == 0  # nothing else reads them
