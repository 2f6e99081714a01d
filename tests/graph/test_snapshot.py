"""A graph is again what it was, whatever a pass left of it."""

import torch
import torch.fx

from moe_compile.graph.snapshot import Snapshot
from moe_compile.graph.torch_calls import make_stable


def test_a_graph_whose_nodes_a_pass_left_out_of_order_is_restored():
    """Erasing backwards met a node with readers before it: the failure of a pass became another."""
    gm = torch.fx.symbolic_trace(lambda x: torch.relu(torch.neg(x)))
    before, code = Snapshot(gm.graph), str(gm.graph)
    negated, positive = (n for n in gm.graph.nodes if n.op == "call_function")
    positive.append(negated)
    before.restore(gm.graph)
    gm.graph.lint()
    assert str(gm.graph) == code


def test_a_method_that_a_pass_made_a_function_is_a_method_again():
    gm = torch.fx.symbolic_trace(lambda x: x.argsort())
    before, code = Snapshot(gm.graph), str(gm.graph)
    (sort,) = gm.graph.find_nodes(op="call_method", target="argsort")
    make_stable(sort)
    assert sort.op == "call_function"
    before.restore(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert str(gm.graph) == code
    assert torch.equal(gm(torch.tensor([3, 1, 2])), torch.tensor([1, 2, 0]))
