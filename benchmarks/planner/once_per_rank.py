"""What a token's rows would take that go once to each rank of a node: predicted.

Contract
    Two hops with nodes of one rank each: hop 1 joins all ranks, hop 2 none. As they are built, hop
    2 is a copy; `least_us` leaves out everything that a form of its own could: hop 2 with its
    launch, and the passes over rows of `SPARED_PASSES`. Beside them the all-to-all in chunks, whose
    exchanges run under experts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.planner.dispatch_layers import GatherableLayer
from benchmarks.planner.planned_models import SHAPES, capture_layer, fake_group
from moe_compile.cost.hop_shape import MOVED, HopShape
from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork
from moe_compile.hardware import load_profile
from moe_compile.plan.candidates import HOPS, Candidate
from moe_compile.plan.region_tasks import price_us

MODEL: Final = "qwen3-235b"
RANKS: Final = 8
TOKENS: Final = 2048
"""Of a rank: of two sequences of 4096 that four ranks share, as the recipe has them."""
CHUNKS: Final = (1, 2, 4, 8)
PROFILES: Final = ("h100", "h800", "h200", "a100")
EXCHANGES: Final = {"exact": 2, "rounded": 4}
"""That go once to a rank, forward and backward."""
SPARED_PASSES: Final = {"exact": 2, "rounded": 6}
"""Of each exchange one of the two passes that gather the same rows where hop 2 is none; where rows
are summed, the pass that the all-to-all has too: of copies the price itself leaves that out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OncePerRank:
    """Times of a layer on one profile, forward and backward."""

    profile: str
    flat_us: dict[int, float]
    """By chunks."""
    hops_us: dict[str, float]
    """By the value of the option, hop 2 as it is built."""
    least_us: dict[str, float]


def shape_of(work: RegionWork, num_experts: int, top_k: int) -> HopShape:
    """Return the nodes of one rank each."""
    return HopShape(
        num_nodes=work.num_ranks,
        num_local=1,
        num_experts=num_experts,
        rows_per_token=top_k,
        row_bytes=work.row_bytes / (TOKENS * top_k),
    )


def predict() -> Iterator[OncePerRank]:
    """Return the times on each profile."""
    shape = next(model for model in SHAPES if model.name == MODEL)
    layer = GatherableLayer.of(capture_layer(shape, fake_group(RANKS), TOKENS))
    work = layer.work()
    work = replace(work, hops=shape_of(work, shape.num_experts, shape.top_k))
    for profile in PROFILES:
        rates = Rates.of(load_profile(profile), RANKS)
        hops = {nodes: price_us(work, Candidate(nodes=nodes), rates) for nodes in HOPS}
        one_pass = rates.compute_us(0.0, MOVED * work.row_bytes, 1.0)
        hop = rates.hop_us(0.0, within=True) + rates.op_overhead_us
        yield OncePerRank(
            profile=profile,
            flat_us={n: price_us(work, Candidate(num_chunks=n), rates) for n in CHUNKS},
            hops_us=hops,
            least_us={
                nodes: us - EXCHANGES[nodes] * hop - SPARED_PASSES[nodes] * one_pass
                for nodes, us in hops.items()
            },
        )


def main() -> int:
    """Print a line for each profile."""
    table = Table(title=f"{MODEL}, {RANKS} ranks of a node, {TOKENS} tokens each: predicted ms")
    for heading in ("profile", *(f"flat, {n} chunks" for n in CHUNKS)):
        table.add_column(heading)
    for nodes in HOPS:
        table.add_column(f"once per rank, {nodes}: at least")
    for one in predict():
        least = (f"{one.hops_us[n] / 1e3:.2f}: {one.least_us[n] / 1e3:.2f}" for n in HOPS)
        table.add_row(one.profile, *(f"{us / 1e3:.2f}" for us in one.flat_us.values()), *least)
    Console(width=130).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
