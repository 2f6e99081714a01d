"""fairscale's MOELayer: a fixed number of rows per expert, all-to-alls in equal parts."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.acceptance.subject import Call, Case, Subject

WIDTH = 16
NUM_LOCAL, NUM_EXPERTS = 2, 4


class FeedForward(nn.Module):
    """An expert."""

    def __init__(self, width: int = WIDTH) -> None:
        """Make it of two products."""
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what it makes of its rows."""
        return self.down(torch.relu(self.up(x)))


def _layer(rank: int) -> Subject:
    from fairscale.nn.moe import MOELayer, Top2Gate

    torch.manual_seed(rank)
    experts = nn.ModuleList([FeedForward() for _ in range(NUM_LOCAL)])
    model = MOELayer(Top2Gate(WIDTH, NUM_EXPERTS), experts)
    return Subject(model=model, calls=[Call(args=(torch.randn(4, n, WIDTH),)) for n in (8, 12)])


CASES = (Case(name="MOELayer, Top2Gate", package="fairscale", build=_layer, num_ranks=2),)
