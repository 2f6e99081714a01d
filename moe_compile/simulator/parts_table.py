"""Distance of parts of the batch from free communication, rows in eight bits, as megamoe runs them.

Contract
    Shares are of one layer's time, forward and backward, were its collectives free, with as many
    sequences a rank as there are parts. Attention is whole on every rank, experts are shared out:
    FSDP and expert parallelism. Parts, and hops between nodes, are priced with the operators that
    the compiler's rewrite adds.
    `limit` bounds every order of the same kernels where forward and backward are graphs of their
    own: in each the shorter of compute and network runs beside the other throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from moe_compile.cost.tasks import COMPUTE, LINK, TaskList
from moe_compile.simulator.layer_costs import LayerCosts
from moe_compile.simulator.layer_tasks import bound_us, tasks_of, time_layer
from moe_compile.simulator.method import HOPS, AttentionSharding, Crossing, Overlap, Products
from moe_compile.simulator.scenario import make_setting

ONE_NODE: Final = ("352b", "mixtral-8x22b", "deepseek-moe-16b", "qwen3-235b", "qwen3-30b")
"""Models whose experts the eight ranks of a node share."""
MANY_NODES: Final = "deepseek-v3"
"""A model whose experts lie on 64 ranks of eight nodes."""
FP8_BYTES: Final = 1.0
SHAPES: Final = ((1, 1), (2, 1), (4, 1), (2, 4), (4, 4))
"""Pairs of parts of the batch and blocks to a graph."""
LARGEST: Final = SHAPES[-1]
EXCHANGES: Final = 4
"""Exchanges of rows in a layer: dispatch and combine, forward and backward."""
PACKED_BYTES: Final = 3
"""Bytes moved per element by a kernel that packs or unpacks: two in bf16, one in eight bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartShares:
    """One model with one way of its rows; shares in percent, of a layer with free collectives."""

    model: str
    way: str
    """The way of rows to the experts."""
    products: str
    """Number format of matrix products but those of weight gradients."""
    exchange_percent: float
    """Collectives over compute, each alone, of a sequence in one part."""
    shares: dict[str, float]
    """Parts and blocks to a graph -> share."""
    limit: float
    """Upper bound of the last of `shares`; see the module docstring."""
    with_packing: float
    """The last of `shares` were rows packed and unpacked by kernels of their own."""


def shape_name(parts: int, blocks: int) -> str:
    """Return the heading of a column."""
    of_parts = f"{parts} parts" if parts > 1 else "whole"
    return of_parts if blocks == 1 else f"{of_parts}, {blocks} blocks"


def find_part_shares(cluster: str, fit: str | None = None) -> tuple[PartShares, ...]:
    """Return a row for each model on `cluster`; for the one on several nodes, one per way."""
    return tuple(_row(cluster, fit, *row) for row in _rows())


def costs_of(
    model: str,
    crossing: Crossing,
    products: str,
    cluster: str,
    fit: str | None = None,
    shape: tuple[int, int] = LARGEST,
) -> LayerCosts:
    """Return the operator costs of a layer for a number of parts and of blocks to a graph."""
    parts, blocks = shape
    changes = {
        "attention": AttentionSharding.WHOLE,
        "ranks": 1,
        "crossing": crossing,
        "overlap": Overlap.INTER_OP,
        "replays_chunks": True,
        "rebuilds": False,
        "dispatch_bytes": FP8_BYTES,
        "combine_bytes": FP8_BYTES,
        "products": Products.ALL if products == "fp8" else Products.BF16,
        "batch_parts": parts,
        "micro_batch": parts,
        "blocks_per_graph": blocks,
    }
    return make_setting(model, cluster, fit=fit, changes=changes).costs


def _rows() -> Iterator[tuple[str, Crossing, str]]:
    """Yield model, way of rows and number format of products."""
    for model in ONE_NODE:
        yield model, Crossing.FLAT, "bf16"
    for crossing in (Crossing.FLAT, *HOPS):
        yield MANY_NODES, crossing, "bf16"
    yield MANY_NODES, Crossing.ROUNDED, "fp8"


def _row(
    cluster: str, fit: str | None, model: str, crossing: Crossing, products: str
) -> PartShares:
    costs = {
        shape: costs_of(model, crossing, products, cluster, fit, shape=shape) for shape in SHAPES
    }
    last, whole = costs[LARGEST], tasks_of(costs[SHAPES[0]])
    compute, network = (sum(_busy_us(one, on) for one in whole) for on in (COMPUTE, LINK))
    return PartShares(
        model=model,
        way=crossing.value if model == MANY_NODES else "one node",
        products=products,
        exchange_percent=100.0 * network / compute,
        shares={shape_name(*shape): share_of_bound(found) for shape, found in costs.items()},
        limit=100.0 * bound_us(last) / limit_us(last),
        with_packing=100.0 * bound_us(last) / (time_layer(last).total_us + packing_us(last)),
    )


def share_of_bound(costs: LayerCosts) -> float:
    """Return a layer's time were collectives free over its time, in percent."""
    return 100.0 * bound_us(costs) / time_layer(costs).total_us


def limit_us(costs: LayerCosts) -> float:
    """Return the least time of a layer, in any order of forward and of backward."""
    link = costs.link
    total = 0.0
    for tasks in tasks_of(costs):
        compute, network = _busy_us(tasks, COMPUTE), _busy_us(tasks, LINK)
        slow_compute, slow_network = 1.0 + link.contention, 1.0 + link.overlap_slowdown
        at_once = min(compute * slow_compute, network * slow_network)
        saved = at_once * (1.0 / slow_compute + 1.0 / slow_network - 1.0)
        total += compute + network - max(saved, 0.0)
    return total / costs.method.blocks_per_graph


def packing_us(costs: LayerCosts) -> float:
    """Return the time of packing and unpacking rows in kernels of their own."""
    nbytes = PACKED_BYTES * costs.local_tokens * costs.model.top_k * costs.model.width
    return 2 * EXCHANGES * costs.kernels.memory_us(nbytes * costs.imbalance)


def _busy_us(tasks: TaskList, stream: str) -> float:
    return sum(task.us for task in tasks.tasks if task.stream == stream)
