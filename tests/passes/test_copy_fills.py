"""Concatenations do not share their constants, and nothing else is made twice."""

import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import load_profile
from moe_compile.plan.state import CompileState
from passes.copy_fills import CAT, CopyFills

A, B = torch.randn(3, 4), torch.randn(2, 4)


def ran(program):
    """Return the graph of `program(A, B)` before and after the pass; its values are the same."""
    gm = make_fx(program, select_decomp_table())(A, B)
    before = len(gm.graph.nodes)
    expected = gm(A, B)
    state = CompileState(config=MegaMoEConfig(), hardware=load_profile("cpu"))
    report = CopyFills().run(gm.graph, state)
    gm.graph.lint()
    gm.recompile()
    assert all(map(torch.equal, gm(A, B), expected))
    return gm.graph, len(gm.graph.nodes) - before, report.applied


def pieces(graph):
    return [cat.args[0][-1] for cat in graph.find_nodes(op="call_function", target=CAT)]


def test_each_concatenation_has_rows_of_zeros_of_its_own():
    def program(a, b):
        zeros = a.new_zeros(4).unsqueeze(0)
        return torch.cat([a, zeros]), torch.cat([b, zeros]), torch.cat([a, b, zeros])

    graph, num_more, applied = ran(program)
    assert len(applied) == 2 and num_more == 2 * 2  # a fill and a view, twice
    assert all(len(piece.users) == 1 for piece in pieces(graph))
    assert len({piece.args[0] for piece in pieces(graph)}) == 3


def test_views_of_one_constant_are_views_of_two():
    def program(a, b):
        zeros = a.new_zeros(4)
        return torch.cat([a, zeros.unsqueeze(0)]), torch.cat([b, zeros.view(1, 4)])

    graph, _, _ = ran(program)
    assert len({piece.args[0] for piece in pieces(graph)}) == 2


def test_what_is_computed_and_what_one_concatenation_reads_is_made_once():
    def program(a, b):
        row = a.sum(0, keepdim=True)
        return torch.cat([a, row]), torch.cat([b, row]), torch.cat([b, b.new_ones(1, 4)])

    _, num_more, applied = ran(program)
    assert num_more == 0 and applied == ()
