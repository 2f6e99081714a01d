"""What a node takes of the host, and whether the host waits for the device there.

Contract
    Read off the graph: an integer costs where code takes it out of what was read, by itself or by
    one call for all. Nothing is measured.
    A graph on one device alone stands for one on a GPU: what the profile has of a host counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx as fx

from moe_compile.graph.precedence import integers_taken, is_view
from moe_compile.graph.query import is_all_to_all, is_wait, tensor_of
from moe_compile.hardware import HardwareProfile
from moe_compile.hardware.host import NO_HOST, HostCosts


def host_us(node: fx.Node, num_kernels: float, host: HostCosts) -> float:
    """Return what the host takes for a node of so many kernels that launches no collective."""
    us = host.read_us * waits_for_device(node)
    return us + (host.integer_us if integers_taken(node) else host.kernel_us * num_kernels)


def launch_us(launch: fx.Node, num_ranks: int, host: HostCosts) -> float:
    """Return what the host takes to launch a collective among so many ranks."""
    return host.launch_us + host.launch_us_per_rank * num_ranks * is_all_to_all(launch)


def is_of_host(tensor: torch.Tensor | None, hardware: HardwareProfile) -> bool:
    """Whether a profile is of the host itself, and the tensor lies there.

    Where a profile has costs of a host, tensors on the host stand for those of its device: a dry
    run has no others.
    """
    is_there = tensor is not None and tensor.device.type == "cpu"
    return is_there and hardware.host == NO_HOST


def waits_for_device(node: fx.Node) -> bool:
    """Whether the host waits there for all that was queued before.

    Of integers of one tensor that is the copy to the host; without one, the first of them.
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
    """Give what takes integers out of a tensor, or of views of it."""
    for user in tensor.users:
        if integers_taken(user):
            yield user
        elif is_view(user):
            yield from _readers(user)


def _copies_to_host(node: fx.Node) -> bool:
    made = tensor_of(node)
    if node.op != "call_function" or is_wait(node) or made is None or made.device.type != "cpu":
        return False
    inputs = [t for a in node.all_input_nodes if (t := tensor_of(a)) is not None]
    return any(t.device.type != "cpu" for t in inputs)
