"""What of the exchanges in a checkpointed layer is kept for the backward pass."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import is_all_to_all, is_wait, value_of
from moe_compile.journal.reasons import Reason
from tests.capture import dynamo_graphs
from tests.dispatch_layers import InOrder, InOrderWeighted

WIDTH = 16


class Checkpointed(nn.Module):
    def __init__(self, style):
        super().__init__()
        self.layer = style(WIDTH, 24, 8, 2, dist.group.WORLD)

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def traced(style):
    x = torch.randn(24, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    gm, *_ = dynamo_graphs(Checkpointed(style), x)
    config = MegaMoEConfig(hardware="cpu", chunks=1, equal_tokens=True)
    state, compilation = rewrite(gm, config)
    inputs = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    return *trace_both(gm, inputs, state), compilation.journal


@pytest.mark.parametrize(("style", "kept"), [(InOrderWeighted, 2), (InOrder, 1)])
def test_rows_are_kept_where_gradients_are_computed_from_them(fake_ranks, style, kept):
    """Weighted rows are needed by the gradients of their weights; rows added up by none."""
    del fake_ranks
    forward, backward, journal = traced(style)
    taken = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    received = [
        node
        for node in forward.graph.nodes
        if is_wait(node) and is_all_to_all(node.all_input_nodes[0]) and value_of(node).ndim == 2
    ]
    assert len(received) == 2
    assert sum(node.name in taken for node in received) == kept
    assert sum(map(is_all_to_all, backward.graph.nodes)) == 2
    reasons = [v.reason for v in journal.verdicts() if v.reason is Reason.NOT_READ_BACKWARD]
    assert len(reasons) == 2 * (2 - kept)
