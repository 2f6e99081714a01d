"""Rows that are filled and scaled by their labels compute in chunks what they compute whole."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from moe_compile.report.process_report import REPORT
from tests.layers import Routed

FX = {"megamoe.codegen": "fx", "megamoe.chunks": 2, "megamoe.strict": True}


class ClampedLabels(Routed):
    """transformers' experts: labels are counted by a histogram and clamped where they stand.

    Its sort is made stable.
    """

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.bias = nn.Parameter(rand(self.local, hidden))

    def experts(self, rows, received):
        labels, perm = torch.sort(self.expert_of_rows(rows, received), stable=True)
        x = rows[perm // 1]
        counts = torch.histc(labels.float(), bins=self.local, min=0, max=self.local - 1)
        offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
        mask = (labels >= self.local).unsqueeze(-1)
        labels.clamp_(max=self.local - 1)
        bias = self.of_rows(labels)
        x.masked_fill_(mask, 0.0)
        weights = torch.ones_like(labels, dtype=rows.dtype)[perm]
        h = torch._grouped_mm(x, self.w1, offs=offs)
        h = F.silu(h.add_(bias) if bias is not None else h).masked_fill(mask, 0.0)
        out = torch._grouped_mm(h, self.w2, offs=offs) * weights.unsqueeze(-1)
        out = out.masked_fill(mask, 0.0)
        back = torch.empty_like(perm)
        back[perm] = torch.arange(perm.size(0), device=perm.device)
        return out[back]

    def of_rows(self, labels):
        return None


class ClampedLabelsOfBiases(ClampedLabels):
    """Biases are read by the labels once these are clamped."""

    def of_rows(self, labels):
        return self.bias[labels]


class WrittenAndKept(ClampedLabels):
    """Labels that are written once all is computed of them, and handed out."""

    def forward(self, x):
        out = super().forward(x)
        kept, self._kept = self._kept, None
        return out * (1 + kept.sum())

    def of_rows(self, labels):
        labels.mul_(labels)
        self._kept = labels


def outcome(rank, style, backend):
    """Return outputs and gradients of two steps, and the verdicts on regions."""
    torch._dynamo.reset()
    before = len(REPORT.compilations)
    layer = style(16, 24, 6, 2, dist.group.WORLD)
    options = FX if backend == "megamoe" else None
    run = torch.compile(layer, backend=backend, options=options)
    tensors = []
    for tokens in (12 + 8 * rank, 20):
        own = torch.Generator().manual_seed(tokens + rank)
        x = torch.randn(tokens, 16, generator=own).bfloat16().requires_grad_()
        out = run(x)
        out.float().square().sum().backward()
        tensors += [out.detach(), x.grad]
    regions = [region for c in REPORT.compilations[before:] for region in c.regions]
    gradients = [weight.grad for weight in layer.parameters() if weight.grad is not None]
    return [*tensors, *gradients], {region.verdict for region in regions}


STYLES = [ClampedLabels, ClampedLabelsOfBiases, WrittenAndKept]


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_masks_of_labels_are_equal_in_chunks(two_ranks, style):
    plain, chunked = (two_ranks.run(outcome, style, way) for way in ("aot_eager", "megamoe"))
    for (expected, _), (found, verdicts) in zip(plain, chunked, strict=True):
        assert verdicts == {"chunked"}
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
