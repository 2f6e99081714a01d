"""Inside a checkpoint the terms of a gradient follow those of what reads the tensor behind it."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.gradient_order import find_later_reader
from moe_compile.graph.inner_graphs import bodies
from moe_compile.graph.legality import Hazard
from moe_compile.graph.outer_gradients import note_outer_gradients
from tests.graph.test_legality import called, graph_of


def inside(x):
    """Two readers; the first may run behind the second where no term comes before theirs."""
    y = x.sin()
    z = x.cos()
    return y.neg() + z


def checkpointed(x, function=inside):
    return checkpoint(function, x, use_reentrant=False)


def nested(x):
    return checkpointed(x, checkpointed) + x.exp()


PROGRAMS = {
    "read by it alone": (checkpointed, False),
    "read before it": (lambda x: x.exp() + checkpointed(x), False),
    "read behind it": (lambda x: checkpointed(x) + x.exp(), True),
    "given back and read behind it": (lambda x: checkpointed(x) + x.contiguous().exp(), True),
    "read behind it without a gradient": (lambda x: checkpointed(x) + x.detach().exp(), False),
    "returned": (lambda x: (checkpointed(a := x * 2), a), True),
    "given to the next one": (lambda x: checkpointed(x) + checkpointed(x), True),
    "read behind the outer one": (nested, True),
    "read behind the outer one's last reader": (lambda x: nested(x * 2), True),
}


def innermost(graph):
    """Note outer terms all the way in; return the first graph without a graph inside."""
    note_outer_gradients(graph)
    body = next((body for node in graph.nodes for body in bodies(node)), None)
    return graph if body is None else innermost(body.graph)


@pytest.mark.parametrize(("program", "has_terms"), PROGRAMS.values(), ids=PROGRAMS)
def test_two_terms_of_an_input_change_places_only_where_none_comes_before_them(program, has_terms):
    graph = innermost(graph_of(program))
    obstacle = GraphFacts(graph).legality.obstacle(called(graph, "sin"), called(graph, "neg")[0])
    assert (obstacle is not None) is has_terms
    if has_terms:
        assert obstacle.hazard is Hazard.GRADIENT_ORDER
    together = {*called(graph, "sin"), *called(graph, "cos")}
    (source,) = {node.args[0] for node in together}
    assert find_later_reader(together, source, Dependence(graph)) is (source if has_terms else None)


def test_autograd_adds_up_over_a_checkpoint_as_over_what_is_in_it():
    """The rule rests on this: the sum inside is none of its own."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def gradient(program):
        x.grad = None
        program().sum().backward()
        return x.grad

    def several(*functions):
        return lambda y: sum(function(y) for function in functions)

    sin, cos, exp = torch.sin, torch.cos, torch.exp
    flat = gradient(lambda: several(sin, cos, exp)(x))
    assert torch.equal(gradient(lambda: checkpointed(x, several(sin, cos)) + exp(x)), flat)
    swapped = gradient(lambda: checkpointed(x, several(cos, sin)) + exp(x))
    assert not torch.equal(swapped, flat)
