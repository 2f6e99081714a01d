"""Under activation checkpointing: same bits, and exchanges are saved, not recomputed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_compile.ops.agreement import executed_records
from moe_compile.testing.equivalence import differing_tensors
from tests.layers import GroupedExperts

CHUNKS = 2


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = GroupedExperts(16, 24, 8, 2, dist.group.WORLD)

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def run(rank, recompute):
    """Return what differs from eager, and the launches of the backward graph."""
    torch._dynamo.reset()
    before = len(executed_records())
    generator = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randn(24, 16, generator=generator).bfloat16() for _ in range(2))
    options = {
        "megamoe.chunks": CHUNKS, "megamoe.strict": True, "megamoe.recompute": recompute,
    }  # fmt: skip
    differing = differing_tensors(Checkpointed, [(x, gradient)], options)
    phases = {r["phase"]: len(r["launches"]["0"]) for r in executed_records()[before:]}
    return differing, phases


@pytest.mark.parametrize(
    ("recompute", "backward"),
    [("save_exchanges", 2 * CHUNKS), ("recompute_exchanges", 1 + 2 * CHUNKS + 2 * CHUNKS)],
)
def test_exchanges_are_saved_unless_asked_otherwise(two_ranks, recompute, backward):
    for differing, phases in two_ranks.run(run, recompute):
        assert differing == []
        assert phases == {"forward": 1 + 2 * CHUNKS, "backward": backward}
