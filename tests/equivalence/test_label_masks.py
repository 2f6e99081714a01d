"""Rows that are filled and scaled by their labels compute in chunks what they compute whole."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_compile.report.process_report import REPORT
from tests.layers import Routed

FX = {"megamoe.codegen": "fx", "megamoe.chunks": 2, "megamoe.strict": True}


class MaskedByLabels(Routed):
    """Rows, and what experts made of them, filled where the row's label says so."""

    def experts(self, rows, received):
        labels, perm = torch.sort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        x = rows[perm]
        x.masked_fill_((labels == 0)[:, None], 0.5)
        h = F.silu(torch._grouped_mm(x, self.w1, offs=offs))
        out = torch._grouped_mm(h * torch._grouped_mm(x, self.w3, offs=offs), self.w2, offs=offs)
        out = out.masked_fill((labels >= self.local - 1)[:, None], 0.0) * (labels + 1)[:, None]
        return torch.zeros_like(out).index_copy(0, perm, out)


def outcome(rank, backend):
    """Return outputs and gradients of two steps, and the verdicts on regions."""
    torch._dynamo.reset()
    before = len(REPORT.compilations)
    layer = MaskedByLabels(16, 24, 6, 2, dist.group.WORLD)
    options = FX if backend == "megamoe" else None
    run = torch.compile(layer, backend=backend, options=options)
    tensors = []
    for tokens in (12 + 8 * rank, 20):
        own = torch.Generator().manual_seed(tokens + rank)
        x = torch.randn(tokens, 16, generator=own).bfloat16().requires_grad_()
        out = run(x)
        out.float().square().sum().backward()
        tensors += [out.detach(), x.grad]
    verdicts = {region.verdict for c in REPORT.compilations[before:] for region in c.regions}
    return [*tensors, *(weight.grad for weight in layer.parameters())], verdicts


def test_masks_of_labels_are_equal_in_chunks(two_ranks):
    plain, chunked = (two_ranks.run(outcome, way) for way in ("aot_eager", "megamoe"))
    for (expected, _), (found, verdicts) in zip(plain, chunked, strict=True):
        assert verdicts == {"chunked"}
        assert all(map(torch.equal, found, expected))
