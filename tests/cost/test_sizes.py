"""Symbols become numbers: hints where known, balanced shares where only the run knows."""

import pytest
import torch

from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import is_all_to_all, tensor_of
from tests.scheduled_layers import ChunkedMoE, one_rank_group, post_grad_graphs
from tests.slow_parameters import slow_but

TOKENS, HIDDEN, TOP_K = 96, 64, 2


@pytest.fixture(scope="module", params=slow_but([2], [2, 4]))
def graphs(request):
    torch.manual_seed(0)
    layer = ChunkedMoE(HIDDEN, 64, 8, TOP_K, one_rank_group(), request.param)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    return request.param, post_grad_graphs(layer, x, dynamic=True)


def exchanged_rows(graph, sizes):
    sent = [tensor_of(n.all_input_nodes[0]) for n in graph.nodes if is_all_to_all(n)]
    received = [tensor_of(n) for n in graph.nodes if is_all_to_all(n)]
    return {sizes.shape(t)[0] for t in (*sent, *received) if t.dtype is torch.bfloat16}


def test_every_chunk_exchanges_an_even_share_forward_and_backward(graphs):
    chunks, (forward, backward) = graphs
    known = {}
    for gm in (forward, backward):
        sizes = NominalSizes(known)
        sizes.learn(gm.graph)
        assert exchanged_rows(gm.graph, sizes) == {TOKENS * TOP_K // chunks}


def test_what_the_forward_taught_is_kept_by_name_of_the_symbol(graphs):
    chunks, (forward, _) = graphs
    known = {}
    NominalSizes(known).learn(forward.graph)
    assert TOKENS in known.values()
    assert all(isinstance(name, str) and value >= 1 for name, value in known.items())
    assert {v for k, v in known.items() if k.startswith("u")} == {TOKENS * TOP_K // chunks}


def test_bytes_follow_from_nominal_shapes(graphs):
    chunks, (forward, _) = graphs
    sizes = NominalSizes({})
    sizes.learn(forward.graph)
    dispatch = [n for n in forward.graph.nodes if is_all_to_all(n)][1]
    assert sizes.nbytes(dispatch.meta["val"]) == TOKENS * TOP_K // chunks * HIDDEN * 2


def test_a_busy_rank_receives_more_rows_than_it_sends_and_sends_them_back(graphs):
    """All that follows from what it received grows too, forward and backward."""
    chunks, (forward, backward) = graphs
    sent, known = TOKENS * TOP_K // chunks, {}
    for gm in (forward, backward):
        sizes = NominalSizes(known, received=2.5)
        sizes.learn(gm.graph)
        assert exchanged_rows(gm.graph, sizes) == {sent, 2.5 * sent}
    dispatch, *_, combine = [n for n in forward.graph.nodes if is_all_to_all(n)][1:]
    sizes = NominalSizes(known)
    assert sizes.shape(tensor_of(dispatch))[0] == 2.5 * sent
    assert sizes.shape(tensor_of(combine))[0] == sent
