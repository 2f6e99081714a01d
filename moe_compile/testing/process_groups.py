"""Process groups of tests: the default one, those that programs use beside it, and some of Python.

Contract
    On GPUs a rank has the device of its number on the machine.
    Other groups are made once per default group. All ranks ask for them in the same order. A new
    default group has new ones.
    A group written in Python has the names torch asks of every group.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moe_compile.runtime.node_groups import register_node_groups

BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}
"""Default backend of a device."""
WORKSPACE: Final = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Variable with which cuBLAS is deterministic; read at its first call."""


def join(
    store: dist.Store,
    rank: int,
    num_ranks: int,
    *,
    device: str = "cpu",
    local_rank: int = 0,
    timeout_s: float = 1800.0,
    backend: str = "",
) -> None:
    """Make the default group; `local_rank` is the number of this rank's GPU on its machine."""
    place = None
    if device == "cuda":
        place = torch.device("cuda", local_rank)
        torch.cuda.set_device(place)
    dist.init_process_group(
        backend or BACKENDS[device],
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=place,
    )


def be_deterministic() -> None:
    """Have torch compute the same bits in every run, and fill new memory with NaN.

    On a GPU, sums of rows in any order would differ from run to run. NaN shows reads of memory that
    nobody wrote.
    """
    os.environ.setdefault(*WORKSPACE)
    torch.use_deterministic_algorithms(True, warn_only=True)


def rank_device() -> torch.device:
    """Return the device of this rank's tensors: its GPU in a group of NCCL, else the processor."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def second_group() -> dist.ProcessGroup:
    """Return another group of all ranks."""
    return _second_beside(dist.group.WORLD)


def register_nodes(num_nodes: int) -> None:
    """Register the ranks as those of `num_nodes` nodes."""
    _on_nodes(dist.group.WORLD, num_nodes)


def own_group() -> dist.ProcessGroup:
    """Return the group of this rank alone: its name differs from rank to rank."""
    return _own_beside(dist.group.WORLD)


def forget_groups() -> None:
    """Let go of the groups that the functions above made beside default groups."""
    for made in (_second_beside, _on_nodes, _own_beside):
        made.cache_clear()


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


class PythonGroup(dist.ProcessGroup):
    """Base class; `backend_name` is the name under which the subclass is registered."""

    backend_name = ""

    def __init__(self, rank: int, size: int) -> None:
        """Make a group without a name; torch gives it one."""
        super().__init__(rank, size)
        self._name = ""

    def getBackendName(self) -> str:
        """Return the name torch knows this group's backend by."""
        return self.backend_name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """Name functional collectives find this group by."""
        return self._name


Kind = TypeVar("Kind", bound=PythonGroup)


def new_group_of(
    kind: type[Kind], make: Callable[[Any, int, int, Any], Kind], devices: Sequence[str]
) -> Kind:
    """Return a group of all ranks, made by `make(store, rank, size, timeout)`.

    The default group must exist; a kind is registered once per process.
    """
    (made,) = new_groups_of(kind, make, devices, [None])
    return made


def new_groups_of(
    kind: type[Kind],
    make: Callable[[Any, int, int, Any], Kind],
    devices: Sequence[str],
    groups: Sequence[Sequence[int] | None],
) -> list[Kind]:
    """Make a group of each list of ranks (None for all); return those that this rank is in.

    Each is made as by `new_group_of`; every rank must call with the same groups.
    """
    made: list[Kind] = []

    def create(store: Any, rank: int, size: int, timeout: Any) -> Kind:
        made.append(make(store, rank, size, timeout))
        return made[-1]

    dist.Backend.register_backend(kind.backend_name, create, devices=list(devices))
    for ranks in groups:
        dist.new_group(None if ranks is None else list(ranks), backend=kind.backend_name)
    return made
