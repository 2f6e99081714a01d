"""What of the exchanges in a checkpointed layer is kept for the backward pass."""

import pytest
import torch
from torch import nn

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.precedence import integers_taken
from moe_compile.graph.query import is_all_to_all, is_wait, tensor_of, value_of
from moe_compile.journal.reasons import Reason
from passes.save_exchanges import NOT_READ_BACKWARD
from passes.unpack_integers import UnpackIntegers
from tests.capture import dynamo_graphs
from tests.dispatch_layers import InOrder, InOrderWeighted
from tests.equivalence.test_checkpoint import Checkpointed
from tests.slow_parameters import slow_but

WIDTH = 16


class Twice(nn.Module):
    """Two layers, each checkpointed, that share their weights."""

    def __init__(self, style):
        super().__init__()
        self.layer = Checkpointed(style)

    def forward(self, x):
        return self.layer(self.layer(x))


def traced(layer, **options):
    x = torch.randn(24, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    gm, *_ = dynamo_graphs(layer, x)
    config = MegaMoEConfig(**{"hardware": "cpu", "chunks": 1, "equal_tokens": True, **options})
    state, compilation = rewrite(gm, config)
    inputs = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    return *trace_both(gm, inputs, state), compilation.journal


def kept_rows(forward, backward):
    """Return what exchanges of rows received, and the names of what the backward is given."""
    taken = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    received = [
        node
        for node in forward.graph.nodes
        if is_wait(node) and is_all_to_all(node.all_input_nodes[0]) and value_of(node).ndim == 2
    ]
    return received, taken


@pytest.mark.parametrize(
    ("style", "kept"), slow_but([(InOrder, 1)], [(InOrderWeighted, 2), (InOrder, 1)])
)
def test_rows_are_kept_where_gradients_are_computed_from_them(fake_ranks, style, kept):
    """Weighted rows are needed by the gradients of their weights; rows added up by none."""
    del fake_ranks
    forward, backward, journal = traced(Checkpointed(style))
    received, taken = kept_rows(forward, backward)
    assert len(received) == 2
    assert sum(node.name in taken for node in received) == kept
    assert sum(map(is_all_to_all, backward.graph.nodes)) == 2
    assert not sum(map(integers_taken, backward.graph.nodes)), "it is given these as numbers"
    reasons = [v.reason for v in journal.verdicts() if v.detail == NOT_READ_BACKWARD]
    assert reasons == [Reason.ALREADY_DONE] * (2 * (2 - kept))


def test_the_models_policy_is_left_where_the_option_says_so(fake_ranks):
    del fake_ranks
    _, _, journal = traced(Checkpointed(InOrder), recompute="model")
    said = [v.reason for v in journal.verdicts() if v.detail == "recompute is 'model'"]
    assert said == [Reason.NOT_ASKED] * len(said) != []


@pytest.mark.parametrize("parts", slow_but([1], [1, 2]))
def test_what_comes_between_checkpointed_layers_is_kept_in_place_of_rows(fake_ranks, parts):
    """Of each layer, in each part, rows that were dispatched; and what the second is given."""
    del fake_ranks
    unfused = {"disable_passes": ("fuse_token_sums",)}  # which would give sums other names
    forward, backward, _ = traced(Twice(InOrder), batch_parts=parts, numerics="bounded", **unfused)
    received, taken = kept_rows(forward, backward)
    assert len(received) == 4 * parts
    assert sum(node.name in taken for node in received) == 2 * parts
    assert sum(map(is_all_to_all, backward.graph.nodes)) == 4 * parts
    computed = [n for n in forward.graph.nodes if n.op == "call_function" and n.name in taken]
    tensors = [tensor_of(node) for node in computed if node not in received]
    sizes = [t.numel() for t in tensors if t is not None and t.dtype is torch.bfloat16]
    assert sum(sizes) == 24 * WIDTH


@pytest.mark.parametrize(("chunks", "numbers"), slow_but([(2, [8])], [(2, [8]), (1, [2, 2])]))
def test_sizes_come_by_one_call_with_the_lines_that_need_them(fake_ranks, chunks, numbers):
    """In one chunk on a CPU there are two vectors, which nothing copies together."""
    forward, backward, journal = traced(InOrder(WIDTH, 24, 8, 2, fake_ranks), chunks=chunks)
    taken = [integers_taken(node) for node in forward.graph.nodes if integers_taken(node)]
    assert taken == numbers and not sum(map(integers_taken, backward.graph.nodes))
    found = [r for g, r in journal.records if (g, r.pass_name) == ("forward", UnpackIntegers.name)]
    assert found[0].applied and not found[0].skipped
    assert all(" integers at " in line and ".py:" in line for line in found[0].applied)
