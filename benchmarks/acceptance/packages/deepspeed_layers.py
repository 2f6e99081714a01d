"""DeepSpeed's MoE: a fixed number of rows per expert, all-to-alls in equal parts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from benchmarks.acceptance.packages.fairscale_layer import FeedForward
from benchmarks.acceptance.subject import Call, Case, Subject

WIDTH = 16


def layer(rank: int, **settings: Any) -> Subject:
    """Return a layer of four experts on two ranks, and two steps of tokens `[2, T, WIDTH]`."""
    import deepspeed
    import deepspeed.ops
    from deepspeed.moe.layer import MoE

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # g++ would build it now
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    torch.manual_seed(rank)
    model = MoE(WIDTH, FeedForward(), num_experts=4, ep_size=2, min_capacity=2, **settings)
    for parameter in model.deepspeed_moe.experts.parameters():  # they are copies of one
        nn.init.normal_(parameter, std=0.2)
    model.set_deepspeed_parallelism()
    return Subject(model=model, calls=[Call(args=(torch.randn(2, n, WIDTH),)) for n in (16, 24)])


CASES = tuple(
    Case(
        name=f"DeepSpeed MoE, {name}",
        package="deepspeed",
        build=functools.partial(layer, **settings),
        num_ranks=2,
    )
    for name, settings in {
        "top 1": {"k": 1},
        "top 2": {"k": 2},
        "top 4": {"k": 4},
        "top 2, none dropped": {"k": 2, "drop_tokens": False},
        "top 2, residual": {"k": 2, "use_residual": True},
    }.items()
)
