"""Passes that say they commute do: either order leaves the same graph."""

import itertools

import pytest
import torch
from torch import fx
from torch.distributed._functional_collectives import all_gather_tensor_autograd, wait_tensor

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from passes import size_attention
from passes.pipeline import LEVELS
from passes.size_attention import POSITION_OF_OPTIONS
from tests.capture import dynamo_graphs
from tests.device_programs import exchange, to_list, traced
from tests.layers import GroupedExperts

PAIRS = [
    (first, second)
    for level in LEVELS
    for first, second in itertools.pairwise(level.passes)
    if second.name in first.commutes_with or first.name in second.commutes_with
]


@pytest.fixture
def sharded(fake_ranks):
    """A layer with rows in eight bits whose tokens meet a weight that is gathered from shards.

    A product is added to its result.
    """
    layer = GroupedExperts(128, 24, 8, 2, fake_ranks)
    shard = torch.nn.Parameter(torch.randn(64, 128))
    shared = torch.nn.Parameter(torch.randn(128, 128, dtype=torch.bfloat16))

    def program(x):
        weight = wait_tensor(all_gather_tensor_autograd(shard, 0, fake_ranks))
        x = (x.float() @ weight).bfloat16()
        return layer(x) + x @ shared

    return program


def text_of(graph, passes, state):
    """Return a copy of `graph` after `passes` in order, with the policies of its nodes."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    fuse_sums(copied)
    applied = [p.run(copied, state).applied for p in passes]
    return str(copied), [n.meta.get("recompute") for n in copied.nodes], applied


def in_both_orders(graph, pair, state):
    """Return the names of the passes that did something, the same in either order."""
    one, policies, applied = text_of(graph, pair, state)
    other, others, in_other_order = text_of(graph, pair[::-1], state)
    assert (one, policies, applied) == (other, others, in_other_order[::-1])
    return {p.name for p, done in zip(pair, applied, strict=True) if done}


def sizes_on_the_host():
    """Return a graph on a GPU, in parts: the host reads sizes of rows, pieces of what is joined.

    Rows of zeros are joined to two of them.
    """

    def program(rows, sent, got):
        before, after = torch.cat([rows, rows * 2]).split([4, 4])
        zeros = torch.zeros(1, 2, device=rows.device)
        padded = [torch.cat([piece, zeros]) for piece in (before, rows)]
        return exchange(after, to_list(got * 1), to_list(sent * 1)), before, *padded

    return traced(program, torch.randn(4, 2), torch.tensor([3, 1]), torch.tensor([2, 2])).graph


def sum_of_rows_received():
    """Return a graph on a GPU whose last kernel reads rows of a number that the host reads."""

    def program(rows, counts):
        sent, got = to_list(counts.cpu())
        return exchange(rows, [got], [sent]).sum(0)

    return traced(program, torch.ones(8, 4), torch.ones(2, dtype=torch.int64)).graph


def attention_on_hopper(monkeypatch):
    """Return a graph with the backward of attention, and rows that two sums read halves of."""
    monkeypatch.setattr(size_attention, "capability_of", lambda device: (9, 0))

    def program(rows):
        return [torch.mm(half, half) for half in (rows * 2).split([192, 192])]

    graph = traced(program, torch.randn(384, 192).bfloat16()).graph
    with graph.inserting_before(graph.output_node()):
        query = next(iter(graph.nodes))
        backward = torch.ops.higher_order.flex_attention_backward
        graph.call_function(backward, (query,) * POSITION_OF_OPTIONS + ({},))
    return graph


def fuse_sums(graph):
    """Put sums into products as Inductor does, on its way to the passes behind it."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        products = [a for a in node.all_input_nodes if a.target is torch.ops.aten.mm.default]
        if len(products) == 1 and len(node.all_input_nodes) == 2:
            (addend,) = (a for a in node.all_input_nodes if a not in products)
            with graph.inserting_before(node):
                fused = graph.call_function(
                    torch.ops.aten.addmm.default, (addend, *products[0].args)
                )
            fused.meta.update(node.meta)
            node.replace_all_uses_with(fused)
            graph.erase_node(node)


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=[pytest.mark.slow] * (n % 3 > 0)) for n, pair in enumerate(PAIRS)],
    ids=lambda pair: " ".join(p.name for p in pair),
)
def test_either_order_leaves_the_same_graph(sharded, pair, monkeypatch):
    config = MegaMoEConfig(
        hardware="cpu", chunks=2, dispatch_wire="fp8", gradient_wire="bf16_fp32_sum",
        disable_passes=tuple(p.name for p in pair),
    )  # fmt: skip
    (gm,) = dynamo_graphs(sharded, torch.randn(32, 128, requires_grad=True))
    state, _ = rewrite(gm, config)
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    did = set()
    for graph_module, is_backward in zip(trace_both(gm, inputs, state), (False, True), strict=True):
        state.is_backward = is_backward
        did |= in_both_orders(graph_module.graph, pair, state)
    state.is_in_parts = state.is_captured = True
    did |= in_both_orders(sizes_on_the_host(), pair, state)
    did |= in_both_orders(sum_of_rows_received(), pair, state)
    did |= in_both_orders(attention_on_hopper(monkeypatch), pair, state)
    assert did >= {p.name for p in pair}, "one of them had nothing to do"
