"""What a user is told of a node: the operator and the line."""

import operator

import torch

from moe_compile.graph.legality import Hazard, Obstacle
from moe_compile.graph.query import operator_at
from tests.capture import dynamo_graphs


def program(x, weight):
    hidden = torch.nn.functional.dropout(x, 0.5)
    return hidden.relu() @ weight


def test_an_operator_is_named_as_written_with_its_line():
    """Reports named nodes of the graph, as `hidden`, and no line."""
    (gm,) = dynamo_graphs(program, torch.ones(2, 2), torch.ones(2, 2))
    said = [operator_at(node) for node in gm.graph.nodes]
    first, _, dropout, relu, product, result = said
    assert first.startswith("the input `l_x")
    assert dropout.startswith("`dropout` at test_operator_at.py:13 in program")
    assert relu.startswith("`.relu()` at test_operator_at.py:14 in program")
    assert product.startswith("`matmul` at test_operator_at.py:14")
    assert result == "the result of the graph"
    _, _, drawn, later, *_ = gm.graph.nodes
    assert str(Obstacle(Hazard.RANDOM, drawn, later)) == dropout
    assert str(Obstacle(Hazard.WRITTEN_MEANWHILE, drawn, later)) == f"{dropout}, because of {relu}"


def through_torch(x, norm):
    return norm(x) * 2


def test_a_line_is_the_users_and_not_torchs():
    """`RMSNorm.forward` calls a function of torch that is written in Python: its line was told."""
    (gm,) = dynamo_graphs(through_torch, torch.ones(2, 2), torch.nn.RMSNorm(2))
    (normed,) = (n for n in gm.graph.nodes if "rms_norm" in str(n.target))
    assert "test_operator_at.py:33 in through_torch" in operator_at(normed)


def in_two_graphs(x):
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


def test_the_rest_of_a_function_behind_a_break_has_its_name():
    """It was told as Dynamo calls it, `torch_dynamo_resume_in_in_two_graphs_at_45`."""
    graphs = []
    torch.compile(in_two_graphs, backend=lambda gm, _: graphs.append(gm.graph) or gm)(torch.ones(2))
    (doubled,) = graphs[1].find_nodes(op="call_function", target=operator.mul)
    assert operator_at(doubled) == "`mul` at test_operator_at.py:46 in in_two_graphs"
