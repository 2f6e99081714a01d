"""Under activation checkpointing: same bits, and exchanges are saved, not recomputed."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_compile.runtime.launch_records import executed_records
from moe_compile.testing.equivalence import differing_tensors
from tests.layers import GroupedExperts
from tests.quantized_layers import quantized_eagerly
from tests.slow_parameters import slow_but

CHUNKS = 2


class Checkpointed(nn.Module):
    def __init__(self, style=GroupedExperts):
        super().__init__()
        self.layer = style(16, 24, 8, 2, dist.group.WORLD)

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


class Plain(Checkpointed):
    def forward(self, x):
        return self.layer(x)


def run(rank, recompute, wire="same", more=None):
    """Return what differs from eager, and the launches of the backward graph."""
    torch._dynamo.reset()
    before = len(executed_records())
    generator = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randn(24, 16, generator=generator).bfloat16() for _ in range(2))
    options = {
        "megamoe.chunks": CHUNKS, "megamoe.strict": True, "megamoe.recompute": recompute,
        "megamoe.dispatch_wire": wire, "megamoe.combine_wire": wire,
    }  # fmt: skip
    options |= {f"megamoe.{name}": value for name, value in (more or {}).items()}
    eager = quantized_eagerly(GroupedExperts, wire, wire)
    differing = differing_tensors(Checkpointed, [(x, gradient)], options, lambda: Plain(eager))
    phases = {r["phase"]: len(r["launches"]["0"]) for r in executed_records()[before:]}
    return differing, phases


@pytest.mark.parametrize(
    ("recompute", "backward"),
    slow_but([("save_exchanges", 3)], [("save_exchanges", 3), ("model", 6)]),
)
def test_gathered_tokens_are_saved_unless_asked_otherwise(two_devices, recompute, backward):
    """Gathered again would be tokens, routing and weights; the last sum is needed by nothing."""
    more = {"dispatch": "all_gather", "equal_tokens": True}
    for differing, phases in two_devices.run(run, recompute, "same", more):
        assert differing == []
        assert phases == {"forward": 4, "backward": backward}


LAUNCHES = {"save_exchanges": 2 * CHUNKS, "recompute_exchanges": 1 + 2 * CHUNKS + 2 * CHUNKS}
"""Of a backward graph."""


@pytest.mark.parametrize(
    ("recompute", "wire"),
    slow_but(
        [("recompute_exchanges", "same")],
        itertools.product(LAUNCHES, ("same", "fp8")),
    ),
)
def test_exchanges_are_saved_unless_asked_otherwise(mirrored_ranks, recompute, wire):
    for differing, phases in mirrored_ranks.run(run, recompute, wire, {"equal_tokens": True}):
        assert differing == []
        assert phases == {"forward": 1 + 2 * CHUNKS, "backward": LAUNCHES[recompute]}


@pytest.mark.parametrize("recompute", slow_but(["model"], ["recompute_exchanges", "model"]))
def test_exchanges_are_saved_where_a_rank_may_have_no_tokens(mirrored_ranks, recompute):
    for differing, phases in mirrored_ranks.run(run, recompute):
        assert differing == []
        assert phases == {"forward": 1 + 2 * CHUNKS, "backward": LAUNCHES["save_exchanges"]}
