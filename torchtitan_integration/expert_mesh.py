"""The mesh of experts, with a process group of its own for the exchanges.

Contract
    Experts lie on `dp_replicate` x `efsdp` x `ep` x `etp`, as torchtitan has it. No other axis
    shares the process group of `ep`: on CUDA a group is a queue, and an exchange that stood behind
    FSDP's gathers in one queue could not be hidden. All ranks make the mesh at the same point.

torch hands an axis that spans all ranks the default group, whichever axis it is: with EP over all
ranks, exchanges and FSDP would share a queue. Then, and only then, this module makes another mesh.
"""

from __future__ import annotations

import functools
from typing import Final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.distributed import ParallelDims

AXES: Final = ("pp", "dp_replicate", "efsdp", "ep", "etp")
"""Of torchtitan's sparse mesh, outermost first."""


def expert_mesh(dims: ParallelDims, axes: list[str]) -> DeviceMesh | None:
    """Return `axes` of the experts' mesh; None where one of them is not in use."""
    mesh, ep = dims.get_optional_mesh(axes), dims.get_optional_mesh("ep")
    if mesh is None or ep is None or not has_default_group(ep):
        return mesh
    shards = dims.dp_shard * dims.cp * dims.tp // (dims.etp * dims.ep)
    shape = (dims.pp, dims.dp_replicate, shards, dims.ep, dims.etp)
    own = _own_mesh(dist.group.WORLD, mesh.device_type, shape)
    return own[axes[0]] if len(axes) == 1 else own[tuple(axes)]


def has_default_group(axis: DeviceMesh) -> bool:
    """Return whether an axis of a mesh shares its process group with all others that long."""
    return bool(axis.get_group().group_name == dist.group.WORLD.group_name)


@functools.lru_cache(maxsize=1)
def _own_mesh(world: dist.ProcessGroup, device_type: str, shape: tuple[int, ...]) -> DeviceMesh:
    """Make the mesh; once per job, though pipeline stages ask one by one."""
    backend = dist.get_backend(world)
    groups = {
        axis: backend if axis in ("ep", "efsdp") or size > 1 else "fake"
        for axis, size in zip(AXES, shape, strict=True)
    }
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES, backend_override=groups)
