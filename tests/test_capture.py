"""A layer is traced once (tests/capture.py), and again where its graph would be another."""

import torch

from tests.capture import TRACED, graphs_traced_once, same_program
from tests.layers import GroupedExperts


def test_a_layer_is_traced_again_where_its_graph_would_be_another(fake_ranks):
    def graph_of(layer, tokens=8, **settings):
        x = torch.randn(tokens, 16, dtype=torch.bfloat16, **{"requires_grad": True, **settings})
        (gm,) = graphs_traced_once(layer, x)
        return gm.graph

    def made(*sizes, **settings):
        return GroupedExperts(*(sizes or (16, 24, 8, 2)), fake_ranks, **settings)

    first, second = graph_of(made()), graph_of(made(seed=1))
    assert len(TRACED) == 1 and same_program(first, second) == ""
    first.erase_node(first.find_nodes(op="output")[0])
    assert same_program(second, graph_of(made())) == ""
    chooses_one, given = made(), made()
    chooses_one.top_k = 1
    others = (
        graph_of(chooses_one), graph_of(made(16, 32, 8, 2)), graph_of(made(), tokens=9),
        graph_of(made(), requires_grad=False), graph_of(made().eval()),
    )  # fmt: skip
    assert len(TRACED) == 1 + len(others)
    given.register_forward_hook(lambda *_: None)
    given_twice = [graph_of(given) for _ in range(2)]
    assert len(TRACED) == 1 + len(others) and same_program(*given_twice) == ""
    marked = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.mark_dynamic(marked, 0)
    (gm,) = graphs_traced_once(made(), marked)
    assert len(TRACED) == 1 + len(others) and same_program(gm.graph, second) != ""
