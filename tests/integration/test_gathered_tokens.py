"""torchtitan's own MoE layer, its tokens gathered: equal to eager, or within the reported bound."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.moe import MoE, MoEArgs, utils

from torchtitan_integration.cpu_launcher import generate_permute_indices, prepare_torch

DIM, HIDDEN, EXPERTS, TOP_K = 32, 16, 8, 2
EPS = torch.finfo(torch.bfloat16).eps


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
    layer = layer.bfloat16()
    ExpertParallel()._apply(layer.experts, mesh)
    return layer


def both_ways(rank, score_before_experts):
    """Return output, input gradient and parameters' gradients of eager and compiled."""
    prepare_torch()
    utils.generate_permute_indices = generate_permute_indices  # imported before it was replaced
    torch._dynamo.reset()
    own = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randn(2, 12, DIM, generator=own).bfloat16() for _ in range(2))
    options = {
        "megamoe.dispatch": "all_gather", "megamoe.equal_tokens": True,
        "megamoe.strict": True, "megamoe.codegen": "fx",
    }  # fmt: skip
    results = []
    for compiled in (False, True):
        layer = build(score_before_experts)
        run = (
            torch.compile(layer, backend="megamoe", fullgraph=True, options=options)
            if compiled
            else layer
        )
        tokens = x.clone().requires_grad_()
        output = run(tokens)
        output.backward(gradient)
        tensors = {"output": output.detach(), "input": tokens.grad}
        for name, parameter in layer.named_parameters():
            found = parameter.grad
            tensors[name] = found.to_local() if hasattr(found, "to_local") else found
        results.append({name: tensor.double() for name, tensor in tensors.items()})
    return results


@pytest.mark.slow
def test_weights_before_the_experts_change_no_bit(two_ranks):
    for eager, gathered in two_ranks.run(both_ways, True):
        assert [name for name in eager if not torch.equal(eager[name], gathered[name])] == []


@pytest.mark.slow
def test_weights_after_the_experts_are_off_by_roundings(two_ranks):
    for eager, gathered in two_ranks.run(both_ways, False):
        off = {name: (eager[name] - gathered[name]).norm() for name in eager}
        assert 0 < off["output"] <= TOP_K * EPS * eager["output"].norm()
        for name in ("experts.w1", "experts.w2", "experts.w3"):
            assert off[name] == 0, name
