"""One rank of a job whose other ranks do not exist, and its model without storage.

Contract
    The job, the layout and the model code are those of training: torchtitan's configuration, our
    train specs, a process group that answers for any number of ranks without sending anything.
    Leaving the context ends the group. Needs the CPU work-arounds in place where there is no GPU.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.tools.utils import set_default_dtype

from moe_compile.errors import InvalidConfig, listed
from moe_compile.runtime.node_groups import node_groups_of
from torchtitan_integration.expert_mesh import expert_mesh
from torchtitan_integration.job_config import with_model_compiled
from torchtitan_integration.job_file import JobFile
from torchtitan_integration.layout import Layout, of_model, read_layout
from torchtitan_integration.layout_rules import check_layout
from torchtitan_integration.sequence_mesh import sequence_mesh

AXES: Final = ("cp", "tp", "ep", "etp", "efsdp", "fsdp", "dp_replicate", "pp")
"""Mesh axes a collective may run on, the most particular first."""
RANKS_OF_A_MACHINE: Final = 8
"""Of the cluster that is not there, for `nodes`; `node_ranks` may say otherwise."""


@dataclass(frozen=True, slots=True)
class FakeRank:
    """A job as one of its ranks sees it."""

    job: JobConfig
    dims: ParallelDims
    spec: TrainSpec
    model_args: Any
    """The flavor's arguments after the job's settings, for a GPU: grouped GEMMs as written."""

    def build_model(self) -> nn.Module:
        """Return the whole model on the meta device."""
        with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[self.job.training.dtype]):
            return self.spec.model_cls(self.model_args)

    def axis_of_groups(self) -> dict[str, str]:
        """Return the mesh axis of each process group, by the group's name.

        Groups of nodes, and across them, are called after the axis that was divided so.
        """
        names: dict[str, str] = {}
        for axis in AXES:
            if (mesh := _mesh_of(self.dims, axis)) is not None and mesh.size() > 1:
                group = mesh.get_group().group_name
                names.setdefault(group, axis)
                if (nodes := node_groups_of(group)) is not None:
                    names.setdefault(nodes.cross, f"{axis}, from node to node")
                    names.setdefault(nodes.node, f"{axis}, inside a node")
        return names


def _mesh_of(dims: ParallelDims, axis: str) -> DeviceMesh | None:
    if axis == "cp":
        return sequence_mesh(dims) if dims.cp_enabled else None
    find = expert_mesh if axis in ("ep", "etp", "efsdp") else ParallelDims.get_optional_mesh
    return find(dims, [axis])


@contextlib.contextmanager
def fake_rank(file: JobFile, world: int, rank: int) -> Iterator[FakeRank]:
    """Enter the job of `file` as `rank` of `world` ranks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(min(world, RANKS_OF_A_MACHINE)))
    job = ConfigManager().parse_args([f"--job.config_file={file.path}", *file.overrides])
    if job.experimental.custom_import:
        importlib.import_module(job.experimental.custom_import)
    job = with_model_compiled(job)
    spec = get_train_spec(job.model.name)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        dims = _dims(job, world)
        dims.build_mesh()
        yield FakeRank(job, dims, spec, _model_args(spec, job, read_layout(file.read)))
    finally:
        dist.destroy_process_group()


def _dims(job: JobConfig, world: int) -> ParallelDims:
    degrees = job.parallelism
    try:
        return ParallelDims(
            dp_replicate=degrees.data_parallel_replicate_degree,
            dp_shard=degrees.data_parallel_shard_degree,
            cp=degrees.context_parallel_degree,
            tp=degrees.tensor_parallel_degree,
            pp=degrees.pipeline_parallel_degree,
            ep=degrees.expert_parallel_degree,
            etp=degrees.expert_tensor_parallel_degree,
            world_size=world,
        )
    except AssertionError as error:
        raise InvalidConfig(f"[parallelism] on {world} ranks: {error}") from None


def _model_args(spec: TrainSpec, job: JobConfig, layout: Layout) -> Any:
    name = job.model.flavor
    if name not in spec.model_args:
        raise InvalidConfig(
            f"model.flavor = {name!r}: {job.model.name} has {listed(name, spec.model_args)}"
        )
    args = copy.deepcopy(spec.model_args[name])
    check_layout(of_model(layout, args))
    grouped = args.moe_args.use_grouped_mm
    args.update_from_config(job)
    args.moe_args.use_grouped_mm = grouped  # torchtitan turns it off where there is no SM90
    return args
