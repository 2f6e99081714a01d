"""Estimated time of each node: on the compute stream, and of a collective on its link.

Contract
    Pure arithmetic on the amounts of `cost/amounts.py` and the rates of a hardware profile, as
    the planner's; nothing is measured. Compute is max(operations / matmul rate, bytes / memory
    rate) plus a fixed cost per kernel; a collective is latency plus bytes / link rate, over a
    node's link and the network at once: nodes as they were registered, or else of the profile's
    size. A wait is free.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch.fx as fx

from moe_compile.cost.amounts import Amounts, amounts_of, called_module, ranks_of
from moe_compile.cost.rates import Bound, Rates
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import group_name, is_all_to_all, is_launch
from moe_compile.hardware import HardwareProfile
from moe_compile.runtime.node_groups import ranks_of_a_node


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds one node takes on the compute stream and on a link."""

    compute_us: float = 0.0
    link_us: float = 0.0
    bound: Bound = Bound.NOTHING
    """What the larger part of the time follows from."""
    contention: float = 0.0
    """Of a collective: the share by which compute slows while it runs."""
    overlap_slowdown: float = 0.0
    """Of a collective: the share by which it slows while compute runs."""


def estimate_costs(
    graph: fx.Graph,
    sizes: NominalSizes,
    hardware: HardwareProfile,
    amounts: dict[fx.Node, Amounts] | None = None,
) -> dict[fx.Node, Cost]:
    """Return the estimated cost of every node.

    `amounts` keeps what is read of the nodes, for the same graph on other hardware.
    """
    estimator = _Estimator(sizes, hardware, {} if amounts is None else amounts)
    return {node: estimator.cost(node) for node in graph.nodes}


def us_by_bound(costs: Iterable[Cost]) -> dict[Bound, float]:
    """Return the time on the compute stream that follows from each bound; launches are calls."""
    us = dict.fromkeys((Bound.COMPUTE, Bound.MEMORY, Bound.LAUNCH), 0.0)
    for cost in costs:
        bound = Bound.LAUNCH if cost.bound is Bound.LINK else cost.bound
        if bound in us:
            us[bound] += cost.compute_us
    return us


def estimate_cost(node: fx.Node, sizes: NominalSizes, hardware: HardwareProfile) -> Cost:
    """Return the estimated cost of one node."""
    return _Estimator(sizes, hardware, {}).cost(node)


class _Estimator:
    """Prices nodes; keeps the rates of each size of group, and of node."""

    def __init__(
        self, sizes: NominalSizes, hardware: HardwareProfile, amounts: dict[fx.Node, Amounts]
    ) -> None:
        self.sizes = sizes
        self.amounts = amounts
        self.rates_of = functools.cache(functools.partial(Rates.of, hardware))
        self.rates = self.rates_of(0)

    def cost(self, node: fx.Node) -> Cost:
        if (module := called_module(node)) is not None:
            inner = [self.cost(n) for n in module.graph.nodes]
            longest = max(inner, key=lambda cost: cost.compute_us, default=Cost())
            return Cost(sum(cost.compute_us for cost in inner), bound=longest.bound)
        if node not in self.amounts:
            self.amounts[node] = amounts_of(node, self.sizes)
        found = self.amounts[node]
        if is_launch(node):
            rates = self.rates_of(ranks_of(node), ranks_of_a_node(group_name(node)))
            is_gather = not is_all_to_all(node)
            us = rates.link_us(found.link_bytes, is_gather=is_gather)
            slower = rates.contention, rates.overlap_slowdown
            return Cost(self.rates.op_overhead_us, us, Bound.LINK, *slower)
        amounts = found.operations, found.nbytes, found.num_kernels
        return Cost(self.rates.compute_us(*amounts), bound=self.rates.compute_bound(*amounts))
