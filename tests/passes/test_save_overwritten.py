"""What is computed from a buffer before it is overwritten is saved, not computed again."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_compile.report.process_report import REPORT
from tests.layers import GroupedExperts

WIDTH = 64


def normed(rows, shift):
    """Return rows that a backward wants to compute again from rows and `shift`."""
    rows = rows + shift.to(rows.dtype)
    scale = torch.rsqrt(rows.float().pow(2).mean(-1, keepdim=True) + 1e-3)
    return rows * scale.to(rows.dtype)


class ShiftsExperts(GroupedExperts):
    def __init__(self, group):
        super().__init__(WIDTH, 64, 4, 2, group)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def experts(self, rows, received):
        rows = normed(rows, self.shift)
        self.shift.mul_(0.5)
        return super().experts(rows, received)


class ShiftsAView(ShiftsExperts):
    def experts(self, rows, received):
        rows = normed(rows, self.shift.view(1, -1)[0])
        self.shift.mul_(0.5)
        return GroupedExperts.experts(self, rows, received)


class NoRegion(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16))
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def forward(self, x):
        rows = normed(x, self.shift)
        self.shift.mul_(0.5)
        return rows @ self.weight


def gradients(module, run, x):
    x = x.clone().requires_grad_()
    run(x).float().square().sum().backward()
    return [x.grad, *(weight.grad for weight in module.parameters()), module.shift]


def compare(rank, style):
    """Return whether the gradients are eager's, and the verdicts on regions."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    theirs = style(dist.group.WORLD)
    ours = style(dist.group.WORLD)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    x, before = torch.randn(24, WIDTH, dtype=torch.bfloat16), len(REPORT.compilations)
    options = {"megamoe.codegen": "fx", "megamoe.chunks": 2}
    compiled = torch.compile(ours, backend="megamoe", options=options)
    pairs = zip(gradients(ours, compiled, x), gradients(theirs, theirs, x), strict=True)
    alike = all(torch.equal(a, b) for a, b in pairs)
    return alike, [r.verdict for c in REPORT.compilations[before:] for r in c.regions]


@pytest.mark.parametrize(
    ("style", "verdicts"),
    [
        (ShiftsExperts, ["chunked"]),
        pytest.param(ShiftsAView, ["chunked"], marks=pytest.mark.slow),
        (NoRegion, []),
    ],
)
def test_gradients_are_of_what_a_buffer_was(mirrored_ranks, style, verdicts):
    """The partitioner saved the buffer, and the backward read what it had become."""
    for found in mirrored_ranks.run(compare, style):
        assert found == (True, verdicts)
