"""Estimated time of each node: on the compute stream, and of a collective on its link.

Contract
    Pure arithmetic on the amounts of `cost/amounts.py` and the rates of a hardware profile, as
    the planner's; nothing is measured. Compute is max(operations / matmul rate, bytes / memory
    rate) plus a fixed cost per kernel; a collective is latency plus bytes / link rate, over a
    node's link and the network at once: nodes as they were registered, or else of the profile's
    size. A wait is free. What the host takes for a node is told beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch.fx as fx

from moe_compile.cost.amounts import Amounts, amounts_of, called_module, ranks_of
from moe_compile.cost.host import host_us, is_of_host, launch_us, waits_for_device
from moe_compile.cost.rates import Bound, Rates
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import group_name, is_all_to_all, is_launch, tensor_of
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
    host_us: float = 0.0
    """What the host takes for the node."""
    waits_for_device: bool = False
    """Whether the host waits there for all that was queued before."""


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
        self.hardware = hardware
        self.rates_of = functools.cache(functools.partial(Rates.of, hardware))
        self.rates = self.rates_of(0)

    def cost(self, node: fx.Node) -> Cost:
        if (module := called_module(node)) is not None:
            inner = [self.cost(n) for n in module.graph.nodes]
            longest = max(inner, key=lambda cost: cost.compute_us, default=Cost())
            return Cost(
                sum(cost.compute_us for cost in inner),
                bound=longest.bound,
                host_us=sum(cost.host_us for cost in inner),
            )
        if node not in self.amounts:
            writes_joined = is_of_host(tensor_of(node), self.hardware)
            self.amounts[node] = amounts_of(node, self.sizes, writes_joined=writes_joined)
        found = self.amounts[node]
        if is_launch(node):
            return self._launch(node, found.link_bytes)
        amounts = found.operations, found.nbytes, found.num_kernels
        return Cost(
            self.rates.compute_us(*amounts),
            bound=self.rates.compute_bound(*amounts),
            host_us=host_us(node, found.num_kernels, self.hardware.host),
            waits_for_device=waits_for_device(node),
        )

    def _launch(self, node: fx.Node, link_bytes: float) -> Cost:
        num_ranks = ranks_of(node)
        rates = self.rates_of(num_ranks, ranks_of_a_node(group_name(node)))
        return Cost(
            self.rates.op_overhead_us,
            rates.link_us(link_bytes, is_gather=not is_all_to_all(node)),
            Bound.LINK,
            rates.contention,
            rates.overlap_slowdown,
            host_us=launch_us(node, num_ranks, self.hardware.host),
        )
