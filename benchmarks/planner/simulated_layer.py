"""Time of one model's layer by `megamoe simulate`, as the compiled graph would run it."""

from __future__ import annotations

from typing import Any, Final

from moe_compile.hardware.cluster import load_cluster
from moe_compile.simulator.layer_costs import LayerCosts
from moe_compile.simulator.layer_tasks import time_layer
from moe_compile.simulator.method import AttentionSharding, Crossing, Method, Overlap
from moe_compile.simulator.models import ModelShape

TOKENS: Final = 4096
"""Per rank."""


def simulated_us(
    shape: ModelShape, profile: str, expert_ranks: int, num_chunks: int, **ways: Any
) -> float:
    """Return the microseconds of a layer in so many chunks, nothing fitted.

    Rows are moved to make chunks, and between nodes sent by a plain all-to-all; `ways` are other
    fields of `Method`.
    """
    method = Method(
        attention=AttentionSharding.WHOLE,
        ranks=1,
        expert_ranks=expert_ranks,
        overlap=Overlap.CHUNKS if num_chunks > 1 else Overlap.INTER_OP,
        num_chunks=num_chunks,
        crossing=Crossing.FLAT,
        replays_chunks=True,
        **ways,
    )
    cluster = load_cluster(profile)
    costs = LayerCosts(
        model=shape,
        method=method,
        profile=cluster,
        fit=cluster.fit("none"),
        seq_len=TOKENS,
        tokens=TOKENS,
    )
    return time_layer(costs).total_us
