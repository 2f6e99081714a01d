"""A chunk to which no token of any rank goes, on one rank or on all: right forward and backward.

Its products sum over no row. Memory that nothing has written holds NaN, as far as torch fills it.
"""

import pytest
import torch
import torch.distributed as dist

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.testing.equivalence import differing_tensors
from moe_compile.testing.process_groups import be_deterministic
from passes.zero_empty_groups import GROUPED
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts
from tests.slow_parameters import slow_but

WIDTH, EXPERTS = 16, 8
STARVED = {"of one rank": (6, 7), "of all ranks": (2, 3, 6, 7), "all of one rank": (4, 5, 6, 7)}
"""Experts without a token: the second chunk's, or both chunks', of rank 1, or of both ranks."""


class Starved(GroupedExperts):
    """Sends no token to some experts, however it is trained."""

    starved = ()

    def route(self, x):
        logits = (x @ self.router).float()
        logits = logits.index_fill(1, torch.tensor(self.starved, device=x.device), -1e4)
        scores, chosen = torch.topk(torch.softmax(logits, -1), self.top_k, -1)
        return scores, chosen


def steps(rank, starved, codegen="fx"):
    torch._dynamo.reset()
    group = dist.group.WORLD

    def build():
        layer = Starved(WIDTH, 24, EXPERTS, 2, group)
        layer.starved = starved
        return layer

    torch.manual_seed(rank)
    inputs = [
        tuple(torch.randn(tokens + rank, WIDTH, dtype=torch.bfloat16) for _ in range(2))
        for tokens in (5, 6)
    ]
    before = torch.are_deterministic_algorithms_enabled()
    be_deterministic()  # fills what `empty` makes with NaN
    try:
        return differing_tensors(build, inputs, {"megamoe.chunks": 2, "megamoe.codegen": codegen})
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)


def test_no_stride_of_a_product_is_a_number_of_rows(fake_ranks):
    """Of rows that are none torch takes no such stride: the first step without any would end."""
    x = torch.randn(32, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(GroupedExperts(WIDTH, 24, EXPERTS, 2, fake_ranks), x)
    ours, _ = rewrite(gm, MegaMoEConfig(hardware="cpu", chunks=2))
    inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    for traced in trace_both(gm, inputs, ours):
        products = traced.graph.find_nodes(op="call_function", target=GROUPED)
        operands = [operand.meta["val"] for node in products for operand in node.args[:2]]
        assert any(type(size) is not int for value in operands for size in value.shape)
        assert all(type(stride) is int for value in operands for stride in value.stride())


@pytest.mark.parametrize("starved", slow_but([], STARVED))
def test_a_chunk_without_rows_computes_what_the_layer_does(two_devices, starved):
    assert two_devices.run(steps, STARVED[starved]) == [[], []]


@pytest.mark.slow
def test_generated_code_of_a_chunk_without_rows_is_right_but_for_rounding(two_ranks):
    """Inductor rounds otherwise than eager: by less than two units of the last place, near 4."""
    for differing in two_ranks.run(steps, STARVED["all of one rank"], "inductor"):
        assert [line for line in differing if not float(line.rpartition(" ")[2]) < 2**-4] == []
