"""Pieces of joined parts are read of the parts; what is no part is left alone."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.config import MegaMoEConfig
from moe_compile.plan.state import CompileState
from passes.forward_cat_split import ForwardCatSplit


def joined_then_split(x, y):
    """Two blocks: what one joins is cut along another dimension of another view."""
    whole = torch.cat([x[None], y[None]], 1).view(4, 6)
    one, two = torch.split(whole.view(1, 4, 2, 3), [1, 3], 1)
    return one.reshape(1, 6) + 1, two.reshape(3, 6) * 2


def joined_then_sliced(x, y):
    whole = torch.cat([x, y])
    return whole[:1] + 1, whole[1:] * 2


def cut_elsewhere(x, y):
    one, two = torch.split(torch.cat([x, y]), [2, 2])
    return one + 1, two * 2


def within_rows(x, y):
    """The elements of a piece do not follow one another."""
    one, two = torch.split(torch.cat([x.new_ones(3, 6), y], 1), [6, 6], 1)
    return one + 1, two * 2 + x.sum()


def every_other(x, y):
    whole = torch.cat([x, y])
    return whole[0:1:2] + 1, whole[1:4:2] * 2


def transposed(x, y):
    whole = torch.cat([x.t(), y.t()], 1).t()
    return whole[:1] + 1, whole[1:] * 2


def ran(program, in_parts=True):
    """Return what the pass did, and the graph."""
    with FakeTensorMode():
        given = torch.ones(1, 6), torch.ones(3, 6)
        traced = make_fx(program)(*given)
    state = CompileState(config=MegaMoEConfig(), hardware=None)
    state.is_in_parts = in_parts
    report = ForwardCatSplit().run(traced.graph, state)
    traced.graph.lint()
    traced.recompile()
    x, y = torch.arange(6.0)[None], torch.arange(6.0, 24.0).view(3, 6)
    for ours, theirs in zip(traced(x, y), program(x, y), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    return report.applied, traced.graph


@pytest.mark.parametrize("program", [joined_then_split, joined_then_sliced])
def test_no_part_waits_for_the_other(program):
    applied, graph = ran(program)
    assert len(applied) == 2
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    inputs = graph.find_nodes(op="placeholder")
    (output,) = graph.find_nodes(op="output")
    for made, source in zip(output.all_input_nodes, inputs, strict=True):
        above = {made}
        while more := {n for node in above for n in node.all_input_nodes} - above:
            above |= more
        assert above & {*inputs} == {source}


@pytest.mark.parametrize("program", [cut_elsewhere, within_rows, every_other, transposed])
def test_what_is_no_part_in_order_is_read_as_before(program):
    assert ran(program)[0] == ()


def test_graphs_that_run_whole_are_left_alone():
    assert ran(joined_then_split, in_parts=False)[0] == ()
