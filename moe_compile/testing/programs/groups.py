"""Process groups that generated programs use beside the default one, made once for each of it.

Contract
    All ranks call these in the same order. A default group that is made anew has new ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moe_compile.runtime.node_groups import register_node_groups
from moe_compile.testing.joining import rank_device


def second_group() -> dist.ProcessGroup:
    """Return another group of all ranks."""
    return _second_beside(dist.group.WORLD)


def register_nodes(num_nodes: int) -> None:
    """Say that the ranks are on so many nodes."""
    _on_nodes(dist.group.WORLD, num_nodes)


def own_group() -> dist.ProcessGroup:
    """Return the group of this rank alone: its name differs from rank to rank."""
    return _own_beside(dist.group.WORLD)


@cache
def _second_beside(default: Any) -> dist.ProcessGroup:
    return dist.new_group(list(range(default.size())))


@cache
def _on_nodes(default: Any, num_nodes: int) -> None:
    num_local = default.size() // num_nodes
    kind = rank_device().type
    mesh = init_device_mesh(kind, (num_nodes, num_local), mesh_dim_names=("node", "place"))
    node, cross = mesh.get_group("place"), mesh.get_group("node")
    register_node_groups(default, node, cross, host=f"node {default.rank() // num_local}")


@cache
def _own_beside(default: Any) -> dist.ProcessGroup:
    groups = [dist.new_group([rank]) for rank in range(default.size())]
    return groups[default.rank()]
