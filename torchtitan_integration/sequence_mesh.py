"""The mesh of the sequence's parts, with a process group of its own for attention's exchanges.

Contract
    The axis `cp` of torchtitan, rank r of it holding the r-th part. FSDP's gathers are in another
    process group: on CUDA a group is a queue (see `expert_mesh`, which does the same for experts).
"""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.distributed import ParallelDims

from torchtitan_integration.expert_mesh import has_default_group


def sequence_mesh(dims: ParallelDims) -> DeviceMesh:
    """Return the mesh over which the sequence is divided; all ranks ask at the same point."""
    mesh = dims.get_mesh("cp")
    if not has_default_group(mesh):
        return mesh
    return _own_mesh(dist.group.WORLD, mesh.device_type, mesh.size())


@functools.lru_cache(maxsize=1)
def _own_mesh(world: dist.ProcessGroup, device_type: str, size: int) -> DeviceMesh:
    groups = {"cp": dist.get_backend(world)}
    return init_device_mesh(device_type, (size,), mesh_dim_names=("cp",), backend_override=groups)
