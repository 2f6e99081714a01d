"""What says of which region an exchange is reaches the forward and the backward graph."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.launch_order import ANNOTATIONS, REGION
from moe_compile.graph.query import is_launch
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts
from tests.slow_parameters import slow_but


@pytest.mark.parametrize("is_checkpointed", slow_but([False], [False, True]))
def test_chunks_of_one_region_pass_one_another_without_a_promise(fake_ranks, is_checkpointed):
    layer = GroupedExperts(16, 24, 8, 2, fake_ranks)
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    called = (lambda x: checkpoint(layer, x, use_reentrant=False)) if is_checkpointed else layer
    gm = dynamo_graphs(called, x)[0]
    state, _ = rewrite(gm, MegaMoEConfig(chunks=2, hardware="cpu", max_memory_increase=2.0))
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    for graph_module in trace_both(gm, inputs, state):
        launches = list(filter(is_launch, graph_module.graph.nodes))
        marks = [(n.meta.get(ANNOTATIONS) or {}).get(REGION) for n in launches]
        assert [mark for mark in marks if mark] == ["1"] * 4
        sent = [n for n, mark in zip(launches, marks, strict=True) if mark]
        need_first = {sent[0]}
        for node in graph_module.graph.nodes:
            if need_first.intersection(node.all_input_nodes):
                need_first.add(node)
        assert sent[1] not in need_first, "both chunks are sent before either comes back"
