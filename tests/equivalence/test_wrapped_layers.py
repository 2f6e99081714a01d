"""Layers compiled inside of DistributedDataParallel and of fully_shard equal eager bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moe_compile.report.process_report import REPORT
from tests.layers import GroupedExperts
from tests.legacy_layers import Megatron
from tests.slow_parameters import exhaustive_but

OWN = ("w1", "w2", "w3")
"""Parameters that every rank has of its own."""


class Block(nn.Module):
    """A layer between two products whose weights are alike on all ranks."""

    def __init__(self, style):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.moe = style(16, 32, 8, 2, dist.group.WORLD)
        self.down = nn.Linear(16, 16, dtype=torch.bfloat16)

    def forward(self, x):
        return self.down(self.moe(self.up(x)))


def replicated(block):
    names = [f"moe.{name}" for name in OWN]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(block, names)
    return DistributedDataParallel(block)


def sharded(block):
    own = {getattr(block.moe, name) for name in OWN}
    return fully_shard(block, mesh=init_device_mesh("cpu", (2,)), ignored_params=own)


def step(model, block, rank):
    own = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randn(12, 16, generator=own).bfloat16() for _ in range(2))
    x.requires_grad_()
    output = model(x)
    output.backward(gradient)
    gradients = [p.grad for p in block.parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return [output.detach(), x.grad, *whole]


def run(rank, style, wrap, is_whole):
    """Return what differs from eager, and what became of the layer."""
    torch._dynamo.reset()
    known = len(REPORT.compilations)
    options = {"megamoe.chunks": 2, "megamoe.codegen": "fx"}
    block = Block(style)
    expected = step(wrap(block), block, rank)
    block = Block(style)
    model = wrap(block)
    if is_whole:
        model = torch.compile(model, backend="megamoe", options=options)
    else:
        block.moe.compile(backend="megamoe", options=options)
    pairs = zip(expected, step(model, block, rank), strict=True)
    differing = [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    return differing, [r.verdict for c in REPORT.compilations[known:] for r in c.regions]


@pytest.mark.parametrize("is_whole", [True, False], ids=["model", "layer"])
@pytest.mark.parametrize("wrap", [replicated, sharded])
@pytest.mark.parametrize("style", exhaustive_but([GroupedExperts], [GroupedExperts, Megatron]))
def test_a_layer_of_a_wrapped_model_is_chunked(two_ranks, style, wrap, is_whole):
    for differing, verdicts in two_ranks.run(run, style, wrap, is_whole):
        assert differing == []
        assert verdicts == ["chunked"]
