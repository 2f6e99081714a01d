"""torchtitan's own MoE layer, its rows in two hops: equal to eager, bit for bit, in both orders.

With sums on the nodes close to it: tests/equivalence/test_sums_on_nodes.py has the bounds.
"""

import pytest
import torch

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from torchtitan.models.moe import utils

from tests.integration.test_gathered_tokens import DIM, build
from tests.node_ranks import in_two_hops, seat
from torchtitan_integration.cpu_launcher import generate_permute_indices, prepare_torch

OPTIONS = {"megamoe.nodes": "exact", "megamoe.strict": True, "megamoe.codegen": "fx"}
TOKENS = ((2, 12), (1, 7), (3, 3), (1, 2))
"""Sequences and their length, by rank."""


def both_steps(rank, score_before_experts, dtype, num_nodes, options):
    """Return a step's tensors by name, compiled and eager, and what was not put in two hops."""
    prepare_torch()
    utils.generate_permute_indices = generate_permute_indices  # imported before it was replaced
    torch._dynamo.reset()
    seat(rank, num_nodes)
    eager = build(score_before_experts).to(dtype)
    other = build(score_before_experts).to(dtype)
    compiled = torch.compile(other, backend="megamoe", fullgraph=True, options=options)
    with in_two_hops() as left:
        ours, expected = (
            run(rank, dtype, layer, of) for layer, of in ((compiled, other), (eager, eager))
        )
    return ours, expected, left


def differing(rank, *settings):
    """Return which of output, input gradient and parameters' gradients differ from eager's."""
    ours, expected, left = both_steps(rank, *settings, OPTIONS)
    return left + [name for name in expected if not torch.equal(expected[name], ours[name])]


def far(rank, *settings):
    """Return which of them are farther from eager's than other orders of sums in float32 are."""
    options = {**OPTIONS, "megamoe.nodes": "rounded"}
    ours, expected, left = both_steps(rank, *settings, options)
    off = {name: (expected[name] - ours[name]).norm() / expected[name].norm() for name in expected}
    return left + [name for name, share in off.items() if not share < 1e-5]


def run(rank, dtype, function, layer):
    """Return what a step of `function`, which runs `layer`, computes, by name."""
    own = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randn(*TOKENS[rank], DIM, generator=own).to(dtype) for _ in range(2))
    x.requires_grad_()
    output = function(x)
    output.backward(gradient)
    tensors = {"output": output.detach(), "input": x.grad}
    for name, parameter in layer.named_parameters():
        found = parameter.grad
        tensors[name] = found.to_local() if hasattr(found, "to_local") else found
    return tensors


@pytest.mark.parametrize(
    ("score_before_experts", "dtype"),
    [
        pytest.param(True, torch.bfloat16, marks=pytest.mark.slow),
        (False, torch.bfloat16),
        pytest.param(True, torch.float32, marks=pytest.mark.slow),
        pytest.param(False, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_no_bit_changes_whether_scores_come_before_or_after_the_experts(
    four_ranks, score_before_experts, dtype
):
    results = four_ranks.run(differing, score_before_experts, dtype, 2)
    assert results == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("score_before_experts", [True, False])
def test_sums_on_the_nodes_differ_by_their_order(four_ranks, score_before_experts):
    assert four_ranks.run(far, score_before_experts, torch.float32, 2) == [[]] * 4
