"""Estimated time of each node: on the compute stream, and of a collective on its link.

Contract
    Pure arithmetic on the amounts of `cost/amounts.py` and the rates of a hardware profile, as
    in the planner; nothing is measured. Compute is max(operations / matmul rate, bytes / memory
    rate) plus a fixed cost per kernel. A collective is latency plus bytes / link rate, over a
    node's link and the network at once: nodes as they were registered, or else of the profile's
    size. A copy to the host or back takes the link to the host and no compute. A wait is free. Host
    time is stated beside.

Host time of a node, and whether the host waits for the device there, are read off the graph: an
integer costs where code takes it out of a tensor that was read, by itself or by one call for all.
A graph that is on one device alone stands for one on a GPU: the profile's host costs count.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from moe_compile.cost.amounts import Amounts, amounts_of, called_module, ranks_of
from moe_compile.cost.rates import Bound, Rates
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.precedence import integers_taken, is_view
from moe_compile.graph.query import (
    group_name,
    is_all_to_all,
    is_copy,
    is_copy_wait,
    is_launch,
    is_wait,
    tensor_of,
)
from moe_compile.hardware import HardwareProfile
from moe_compile.hardware.profile import NO_HOST, HostCosts
from moe_compile.runtime.node_groups import ranks_of_a_node


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds one node takes on the compute stream and on a link."""

    compute_us: float = 0.0
    link_us: float = 0.0
    bound: Bound = Bound.NOTHING
    """The resource that takes the larger part of the time."""
    contention: float = 0.0
    """Share by which compute slows while a collective runs."""
    overlap_slowdown: float = 0.0
    """Share by which a collective slows while compute runs."""
    host_us: float = 0.0
    """Time of the host for the node."""
    waits_for_device: bool = False
    """Whether the host waits there for all work queued before."""
    copy_us: float = 0.0
    """Time of the link to the host."""


def estimate_costs(
    graph: fx.Graph,
    sizes: NominalSizes,
    hardware: HardwareProfile,
    amounts: dict[fx.Node, Amounts] | None = None,
) -> dict[fx.Node, Cost]:
    """Return the estimated cost of every node.

    `amounts` caches the amounts of nodes, for the same graph on other hardware.
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
    """Prices nodes; caches the rates of each size of group, and of node."""

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
        if is_copy(node):
            return self._copy(found.host_bytes)
        amounts = found.operations, found.nbytes, found.num_kernels, found.product
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

    def _copy(self, nbytes: float) -> Cost:
        link = self.hardware.host_link
        us = link.copy_us(nbytes) if link is not None else 0.0
        return Cost(host_us=self.hardware.host.launch_us, copy_us=us)


def host_us(node: fx.Node, num_kernels: float, host: HostCosts) -> float:
    """Return the host time of a node with so many kernels that launches no collective."""
    us = host.read_us * waits_for_device(node)
    return us + (host.integer_us if integers_taken(node) else host.kernel_us * num_kernels)


def launch_us(launch: fx.Node, num_ranks: int, host: HostCosts) -> float:
    """Return the host time to launch a collective among so many ranks."""
    return host.launch_us + host.launch_us_per_rank * num_ranks * is_all_to_all(launch)


def is_of_host(tensor: torch.Tensor | None, hardware: HardwareProfile) -> bool:
    """Whether a profile is of the host itself, and the tensor lies there.

    Where a profile has host costs, tensors on the host stand for those of its device: a dry run has
    no others.
    """
    is_there = tensor is not None and tensor.device.type == "cpu"
    return is_there and hardware.host == NO_HOST


def waits_for_device(node: fx.Node) -> bool:
    """Whether the host waits at `node` for all work queued before.

    Of integers of one tensor the copy to the host waits; without a copy, the first integer does.
    """
    if not integers_taken(node):
        return _copies_to_host(node)
    tensor = node.args[0]
    while isinstance(tensor, fx.Node) and is_view(tensor):
        tensor = tensor.args[0]
    if not isinstance(tensor, fx.Node) or tensor.op != "call_function" or _copies_to_host(tensor):
        return False
    return next(_readers(tensor)) is node


def _readers(tensor: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that take integers out of a tensor, or of views of it."""
    for user in tensor.users:
        if integers_taken(user):
            yield user
        elif is_view(user):
            yield from _readers(user)


def _copies_to_host(node: fx.Node) -> bool:
    made = tensor_of(node)
    if node.op != "call_function" or is_wait(node) or made is None or made.device.type != "cpu":
        return False
    if is_copy(node) or is_copy_wait(node):
        return False
    inputs = [t for a in node.all_input_nodes if (t := tensor_of(a)) is not None]
    return any(t.device.type != "cpu" for t in inputs)
