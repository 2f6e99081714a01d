"""Sizes of what exchanges receive are sums of split sizes; what they receive is not asked."""

import pytest
import torch
import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.plan.state import CompileState
from passes.sizes_from_splits import SizesFromSplits

EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
SIZE = torch.ops.aten.sym_size.int


def graph_with(splits, dim=0):
    """Return a graph that asks for a size of what `splits`, names of inputs, brings."""
    graph = fx.Graph()
    rows, *given = (graph.placeholder(name) for name in ("rows", "a", "b"))
    received = [given["ab".index(s)] for s in splits]
    launch = graph.call_function(EXCHANGE, (rows, received, list(received), "group"))
    wait = graph.call_function(WAIT, (launch,))
    sizes = [graph.call_function(SIZE, (node, dim)) for node in (launch, wait)]
    graph.output((wait, *sizes))
    return graph


def run(graph):
    state = CompileState(config=MegaMoEConfig(), hardware=None)
    return SizesFromSplits().run(graph, state)


def test_the_size_of_what_arrives_is_the_sum_of_the_splits():
    graph = graph_with("ab")
    assert len(run(graph).applied) == 2
    graph.lint()
    (output,) = graph.find_nodes(op="output")
    _, *sizes = output.args[0]
    inputs = graph.find_nodes(op="placeholder")[1:]
    assert [(s.target, s.args) for s in sizes] == [(torch.sym_sum, (inputs,))] * 2


@pytest.mark.parametrize(("splits", "dim"), [("", 0), ("ab", 1)])
def test_equal_parts_and_other_dimensions_are_asked_as_before(splits, dim):
    graph = graph_with(splits, dim)
    assert run(graph).applied == ()
    assert len(graph.find_nodes(op="call_function", target=SIZE)) == 2
