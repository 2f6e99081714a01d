"""Arguments are found however a call gives them; a call with unknown ones is refused."""

import pytest
import torch
from torch import fx

from moe_compile.dims.arguments import argument, dim_of, joined, moved
from moe_compile.dims.factors import Lost


@pytest.fixture
def graph():
    return fx.Graph()


def test_position_name_and_the_name_that_numpy_has_are_one(graph):
    x = graph.placeholder("x")
    for args, kwargs in (((x, 2, -1), {}), ((x, 2), {"axis": -1}), ((), {"x": x, "dim": -1})):
        call = graph.call_function(torch.chunk, args, kwargs)
        assert moved(call) is x
        assert dim_of(call, 3, default=0) == 2
    assert dim_of(graph.call_method("chunk", (x, 2)), 3, default=0) == 0


def test_an_unknown_argument_is_refused(graph):
    a, b, c = (graph.placeholder(name) for name in "abc")
    call = graph.call_function(torch.cat, ([a, b],), {"out": c})
    with pytest.raises(Lost, match="has no rule: out"):
        joined(call)
    with pytest.raises(Lost, match="has no rule: output_size"):
        argument(graph.call_method("repeat_interleave", (a, 2), {"output_size": 8}), "repeats")


@pytest.mark.parametrize("parts", [(1, 2), "ab", None])
def test_what_is_joined_must_be_known(graph, parts):
    with pytest.raises(Lost):
        joined(graph.call_function(torch.stack, (parts,)))
