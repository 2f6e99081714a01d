"""Compute of the same graph stands between launch and wait of attention's exchanges."""

import pytest
import torch
import torch.distributed as dist

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import is_launch, is_wait, overload_name
from tests.attention_layers import SplitAttention
from tests.block_layers import ParallelBlock, SerialBlock, block_input
from tests.capture import dynamo_graphs
from tests.filler_kinds import expected, kinds_in_graph
from tests.slow_parameters import slow_but

COMPUTE = ("aten::mm", "aten::_scaled_dot_product")


def hidden_launches(graph):
    """Return for each launch of `graph` the compute between it and its wait."""
    nodes = list(graph.nodes)
    found = {}
    for launch in filter(is_launch, nodes):
        wait = next(user for user in launch.users if is_wait(user))
        between = nodes[nodes.index(launch) : nodes.index(wait)]
        found[launch] = [n for n in between if overload_name(n).startswith(COMPUTE)]
    return found


def test_the_projection_of_q_alone_is_sent_under_that_of_k_and_v(fake_ranks):
    (gm,) = dynamo_graphs(
        SplitAttention(256, 16, 8, 16, fake_ranks), torch.randn(2, 128, 256, requires_grad=True)
    )
    config = MegaMoEConfig(attention_chunks=2, max_memory_increase=2.0, hardware="cpu")
    state, _ = rewrite(gm, config)
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    forward, _ = trace_both(gm, inputs, state)
    is_product = [overload_name(n).endswith("::mm") for n in forward.graph.nodes]
    under = {n for between in hidden_launches(forward.graph).values() for n in between}
    assert sum(is_product) == 3
    assert sum(overload_name(n).endswith("::mm") for n in under) == 1


@pytest.mark.parametrize("style", slow_but([SerialBlock], [SerialBlock, ParallelBlock]))
def test_exchanges_of_attention_and_of_experts_run_under_compute_of_other_kinds(fake_ranks, style):
    groups = {"attention": dist.new_group(), "experts": fake_ranks}
    (gm,) = dynamo_graphs(style(groups["attention"], groups["experts"]), block_input())
    config = MegaMoEConfig(
        chunks=2, attention_chunks=2, max_memory_increase=3.0, hardware="cpu", equal_tokens=True
    )
    state, _ = rewrite(gm, config)
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    graphs = trace_both(gm, inputs, state)
    for phase, graph_module in zip(("forward", "backward"), graphs, strict=True):
        found = kinds_in_graph(graph_module.graph)
        for kind, kinds in expected(style, phase).items():
            assert kinds <= found[groups[kind].group_name], (phase, kind, found)
