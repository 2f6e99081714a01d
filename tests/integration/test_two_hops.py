"""torchtitan's own MoE layer, its rows in two hops: equal to eager, bit for bit, in both orders.

With sums on the nodes close to it: tests/equivalence/test_sums_on_nodes.py has the bounds.
"""

import pytest
import torch

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.moe import MoE, MoEArgs, utils

from tests.integration.test_flex_attention import step_of
from tests.node_ranks import in_two_hops, seat
from tests.slow_parameters import exhaustive_but
from torchtitan_integration.cpu_launcher import generate_permute_indices, prepare_torch
from torchtitan_integration.model_parts import ExpertStyles, apply_experts

OPTIONS = {"megamoe.nodes": "exact", "megamoe.strict": True, "megamoe.codegen": "fx"}
DIM, HIDDEN, EXPERTS, TOP_K = 32, 16, 8, 2
TOKENS = ((2, 12), (1, 7), (3, 3), (1, 2))
"""Sequences and their length, by rank."""


def arguments_of_layer(score_before_experts):
    return MoEArgs(
        num_experts=EXPERTS, top_k=TOP_K, score_before_experts=score_before_experts,
        load_balance_coeff=None,
    )  # fmt: skip


def build(score_before_experts):
    torch.manual_seed(0)
    layer = MoE(arguments_of_layer(score_before_experts), DIM, HIDDEN)
    with torch.no_grad():
        layer.init_weights(0.05, torch.device("cpu"))
        layer.router.gate.weight.mul_(20)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    ExpertParallel()._apply(layer.experts, mesh)
    return layer


def both_ways(rank, tokens, dtype, layers, options):
    """Return what a step computes by name, of the first layer compiled and of the other as it is.

    `tokens` are sequences and their length.
    """
    other, eager = layers
    compiled = torch.compile(other, backend="megamoe", fullgraph=True, options=options)
    own = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randn(*tokens, DIM, generator=own).to(dtype) for _ in range(2))
    steps = []
    for function, layer in ((compiled, other), (eager, eager)):
        given = x.clone().requires_grad_()
        output = function(given)
        output.backward(gradient)
        steps.append(step_of(layer, output, given))
    return steps


def layers_of(made, score_before_experts, dtype):
    prepare_torch()
    utils.generate_permute_indices = generate_permute_indices  # imported before it was replaced
    torch._dynamo.reset()
    return [made(score_before_experts).to(dtype) for _ in range(2)]


def both_steps(rank, score_before_experts, dtype, num_nodes, options, made=build):
    """Return a step's tensors by name, compiled and eager, and what was not put in two hops."""
    layers = layers_of(made, score_before_experts, dtype)
    seat(rank, num_nodes)
    tokens = (SEQUENCES if made is build_tensor_parallel else TOKENS)[rank]
    with in_two_hops(options.get("megamoe.chunks", 1)) as left:
        ours, expected = both_ways(rank, tokens, dtype, layers, options)
    return ours, expected, left


def differing(rank, *settings, made=build, **asked):
    """Return which of output, input gradient and parameters' gradients differ from eager's."""
    options = {**OPTIONS, **{f"megamoe.{name}": value for name, value in asked.items()}}
    ours, expected, left = both_steps(rank, *settings, options, made)
    return left + [name for name in expected if not torch.equal(expected[name], ours[name])]


def far(rank, *settings):
    """Return which of them are farther from eager's than other orders of sums in float32 are."""
    options = {**OPTIONS, "megamoe.nodes": "rounded"}
    ours, expected, left = both_steps(rank, *settings, options)
    off = {name: (expected[name] - ours[name]).norm() / expected[name].norm() for name in expected}
    return left + [name for name, share in off.items() if not share < 1e-5]


@pytest.mark.slow
@pytest.mark.parametrize("score_before_experts", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_bit_changes_whether_scores_come_before_or_after_the_experts(
    four_ranks, score_before_experts, dtype
):
    results = four_ranks.run(differing, score_before_experts, dtype, 2)
    assert results == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("score_before_experts", [True, False])
def test_sums_on_the_nodes_differ_by_their_order(four_ranks, score_before_experts):
    assert four_ranks.run(far, score_before_experts, torch.float32, 2) == [[]] * 4


# --- tensor parallelism, two ranks to a token, as in the recipe of DeepSeek-V3 671B --------------


class Block(nn.Module):
    """A block with experts and nothing else, as the recipe lays them out."""

    moe_enabled = True

    def __init__(self, arguments):
        super().__init__()
        self.moe = MoE(arguments, DIM, HIDDEN)

    def forward(self, x):
        return self.moe(x)


def build_tensor_parallel(score_before_experts):
    """Return the block over all ranks, two to a token; experts lie on all of them."""
    torch.manual_seed(0)
    block = Block(arguments_of_layer(score_before_experts))
    with torch.no_grad():
        block.moe.init_weights(0.05, torch.device("cpu"))
        block.moe.router.gate.weight.mul_(20)
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sparse = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    model = nn.Module()
    model.layers = {"0": block}
    apply_experts(model, ExpertStyles(), tp=dense["tp"], ep=sparse, ep_and_etp=None)
    return block


def differing_with_tensor_parallelism(rank, *settings, axis="experts", num_parts=1):
    made, parts = build_tensor_parallel, {"chunks": num_parts, "chunk_by": axis}
    return differing(rank, *settings, made=made, **parts)


def differing_in_parts(rank, axis):
    settings = (False, torch.bfloat16, 2)
    return differing_with_tensor_parallelism(rank, *settings, axis=axis, num_parts=2)


SEQUENCES = ((2, 6), (2, 6), (1, 9), (1, 9))
"""Of the ranks of a pair alike: each has one half of the sequence, and all of it in the layer."""


@pytest.mark.slow
@pytest.mark.parametrize("score_before_experts", [True, False])
def test_no_bit_changes_where_two_ranks_share_the_routing_of_a_token(
    four_ranks, score_before_experts
):
    settings = (score_before_experts, torch.bfloat16, 2)
    assert four_ranks.run(differing_with_tensor_parallelism, *settings) == [[]] * 4


@pytest.mark.parametrize("axis", exhaustive_but(["experts"], ["experts", "tokens"]))
def test_nor_in_parts(four_ranks, axis):
    assert four_ranks.run(differing_in_parts, axis) == [[]] * 4
