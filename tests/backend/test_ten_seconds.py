"""Within ten seconds after ranks part every rank ends by name, whatever runs rewritten until then.

A pool that ends like this is of no more use, so each test starts its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_compile.runtime.launch_records import executed_records
from moe_compile.runtime.watcher import EXIT_STATUS
from tests.attention_layers import SplitAttention
from tests.backend.test_disagreement import exchange
from tests.backend.test_gradient_wire import ShardedLinear
from tests.backend.test_places_apart import ends
from tests.batch_layers import Block
from tests.layers import GroupedExperts
from tests.node_ranks import seat
from tests.slow_parameters import exhaustive_but


def experts(group):
    return GroupedExperts(16, 24, 8, 2, group)


class Sharded(nn.Module):
    """Weights in shards that the graph gathers, and sums the gradients of."""

    def __init__(self, group):
        super().__init__()
        self.linear = ShardedLinear(group)

    def forward(self, x):
        return self.linear(x)


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """A layer, and the options by which it is rewritten."""

    options: dict
    make: Callable = experts
    shape: tuple = (8, 16)
    dtype: torch.dtype = torch.bfloat16
    num_ranks: int = 2


REWRITES = {
    "chunks": Rewrite(options={"chunks": 2}),
    "chunks of tokens": Rewrite(options={"chunks": 2, "chunk_by": "tokens"}),
    "fp8 wire": Rewrite(options={"chunks": 1, "dispatch_wire": "fp8", "combine_wire": "fp8"}),
    "two hops": Rewrite(options={"nodes": "exact"}, num_ranks=4),
    "all-gather dispatch": Rewrite(options={"dispatch": "all_gather", "equal_tokens": True}),
    "batch parts": Rewrite(
        options={"batch_parts": 2, "chunks": 1},
        make=lambda _: Block(GroupedExperts, torch.bfloat16),
        shape=(2, 16, 64),
    ),
    "attention by heads": Rewrite(
        options={"attention_chunks": 2},
        make=lambda group: SplitAttention(64, 8, 4, 8, group),
        shape=(2, 8, 64),
        dtype=torch.float32,
    ),
    "gradient wire": Rewrite(options={"gradient_wire": "bf16_fp32_sum"}, make=Sharded),
}

SLOW = ("chunks", "two hops", "gradient wire")
"""Collectives of two ranks' rows, of four ranks, and of gradients."""


def prepared(rank, name):
    """Return the layer compiled to run rewritten, and an input."""
    how = REWRITES[name]
    if how.num_ranks == 4:
        seat(rank, 2)
    options = {"megamoe.codegen": "fx", **{f"megamoe.{k}": v for k, v in how.options.items()}}
    model = torch.compile(how.make(dist.group.WORLD), backend="megamoe", options=options)
    torch.manual_seed(rank)
    return model, torch.randn(how.shape, dtype=how.dtype, requires_grad=True)


def run_another_program(rank, name):
    """All run the layer, rewritten; then the last rank runs another program for the first time."""
    model, x = prepared(rank, name)
    for _ in range(2):
        model(x).float().sum().backward()
    assert executed_records(), "nothing was rewritten"
    yield
    if rank + 1 < dist.get_world_size():
        model(x)
    else:
        whole = torch.ones(4, 3, dtype=torch.float64)
        torch.compile(exchange, backend="megamoe")(whole, dist.group.WORLD)


@pytest.mark.parametrize("name", exhaustive_but(SLOW, REWRITES, ["attention by heads"]))
def test_another_program_on_one_rank(tmp_path, name):
    """The others wait in collectives of what they agreed on."""
    num_ranks = REWRITES[name].num_ranks
    statuses, printed = ends(tmp_path, run_another_program, name, num_ranks=num_ranks)
    assert EXIT_STATUS in statuses
    assert all("launch different collectives" in said for said in printed)
