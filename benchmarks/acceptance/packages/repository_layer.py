"""A layer of this repository's own, whose outcome is known: a test of the runner."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.acceptance.subject import Call, Case, Subject
from benchmarks.link.cases import Case as Sizes
from benchmarks.link.layer import MoELayer

SIZES = Sizes(name="own", num_ranks=2, tokens=32, experts=4, width=32, hidden=32)


def own_layer(rank: int) -> Subject:
    """Return the layer, and two steps of tokens `[T, width]`."""
    torch.manual_seed(rank)
    model = MoELayer(SIZES, dist.group.WORLD)
    tokens = (torch.randn(n, SIZES.width, dtype=torch.bfloat16) for n in (32, 48))
    return Subject(model=model, calls=[Call(args=(x,)) for x in tokens])


CASES = (Case(name="own layer", package="megamoe", build=own_layer, num_ranks=2),)
