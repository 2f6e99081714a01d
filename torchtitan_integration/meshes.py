"""The process groups on which a torchtitan job exchanges rows and heads, made with its meshes.

Contract
    Experts lie on `dp_replicate` x `efsdp` x `ep` x `etp`, as torchtitan has it; parts of the
    sequence on `cp`, rank r of it holding the r-th part. No other axis shares the process group of
    `ep` or of `cp`: on CUDA a group is a queue, and an exchange that stood behind FSDP's gathers in
    one queue could not be hidden. torch hands an axis that spans all ranks the default group,
    whichever axis it is; then, and only then, another mesh is made.
    All ranks make meshes, and call `register_nodes`, at the same point. All of them register the
    same nodes, or all raise the same InvalidConfig: nodes that do not divide the groups, machines
    with unequal numbers of ranks. Ranks of one machine, or as many as `megamoe.node_ranks` says,
    follow one another.
    All ranks call `connect_exchanges` at one point after that. Then every communicator that rows
    travel on is made, in the same order on all ranks and not inside a step, and a peer that cannot
    be reached ends the job there.
    `exchange_buffers` counts the memory that NCCL keeps for these groups outside torch's allocator,
    by published measurements on H100s; 0 where exchanges are not NCCL's.

Worked example: 16 ranks, EP 8, ETP 1, machines of 4. Each of the two groups has two nodes:

    ep     [0 1 2 3 4 5 6 7]      node  [0 1 2 3] [4 5 6 7]      cross  [0 4] [1 5] [2 6] [3 7]
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.distributed import ParallelDims

from moe_compile.config import MegaMoEConfig
from moe_compile.errors import InvalidConfig
from moe_compile.runtime.node_groups import node_groups_of, register_node_groups
from moe_compile.runtime.rank_store import UNCOMPARED

EXPERT_AXES: Final = ("pp", "dp_replicate", "efsdp", "ep", "etp")
"""Axes of torchtitan's sparse mesh, outermost first."""


def expert_mesh(dims: ParallelDims, axes: list[str]) -> DeviceMesh | None:
    """Return `axes` of the experts' mesh; None where one of them is not in use."""
    mesh, ep = dims.get_optional_mesh(axes), dims.get_optional_mesh("ep")
    if mesh is None or ep is None or not has_default_group(ep):
        return mesh
    shape = (dims.pp, dims.dp_replicate, expert_shards(dims), dims.ep, dims.etp)
    own = _own_expert_mesh(dist.group.WORLD, mesh.device_type, shape)
    return own[axes[0]] if len(axes) == 1 else own[tuple(axes)]


def expert_shards(dims: ParallelDims) -> int:
    """Return the number of ranks over which FSDP shards the experts of one rank: axis `efsdp`."""
    return dims.dp_shard * dims.cp * dims.tp // (dims.etp * dims.ep)


def has_default_group(axis: DeviceMesh) -> bool:
    """Return whether an axis of a mesh shares its process group with all others that long."""
    return bool(axis.get_group().group_name == dist.group.WORLD.group_name)


@functools.lru_cache(maxsize=1)
def _own_expert_mesh(
    world: dist.ProcessGroup, device_type: str, shape: tuple[int, ...]
) -> DeviceMesh:
    """Make the mesh; once per job, though pipeline stages ask one by one."""
    backend = dist.get_backend(world)
    groups = {
        axis: backend if axis in ("ep", "efsdp") or size > 1 else "fake"
        for axis, size in zip(EXPERT_AXES, shape, strict=True)
    }
    return init_device_mesh(device_type, shape, mesh_dim_names=EXPERT_AXES, backend_override=groups)


def sequence_mesh(dims: ParallelDims) -> DeviceMesh:
    """Return the mesh over which the sequence is divided; all ranks ask at the same point."""
    mesh = dims.get_mesh("cp")
    if not has_default_group(mesh):
        return mesh
    return _own_sequence_mesh(dist.group.WORLD, mesh.device_type, mesh.size())


@functools.lru_cache(maxsize=1)
def _own_sequence_mesh(world: dist.ProcessGroup, device_type: str, size: int) -> DeviceMesh:
    groups = {"cp": dist.get_backend(world)}
    return init_device_mesh(device_type, (size,), mesh_dim_names=("cp",), backend_override=groups)


NODE_AXES: Final = ("outer", "node", "place", "etp")
"""Axes of the mesh that is made here, outermost first."""


def register_nodes(dims: ParallelDims, options: MegaMoEConfig) -> None:
    """Register the nodes of this rank's expert-parallel group, if `options` ask for two hops.

    Does nothing where experts are not on several ranks, or the second time in a job.
    """
    is_asked = dims.ep_enabled and options.nodes != "off"
    experts = expert_mesh(dims, ["ep"]) if is_asked else None
    if experts is not None:
        group, degrees = experts.get_group(), (dims.ep, dims.etp)
        _register(dist.group.WORLD, group, experts.device_type, degrees, options.node_ranks)


@functools.lru_cache(maxsize=1)
def _register(
    world: dist.ProcessGroup,
    experts: dist.ProcessGroup,
    device_type: str,
    degrees: tuple[int, int],
    node_ranks: int,
) -> None:
    """Make the groups and register them; once per job, though pipeline stages ask one by one."""
    of_node = node_ranks or ranks_of_machine(world)
    nodes, places = node_shape(*degrees, of_node)
    together, etp = math.prod(degrees), degrees[1]
    shape = (dist.get_world_size(world) // together, nodes, places, etp)
    backend = dist.get_backend(world)
    backends = {axis: backend if axis in ("node", "place") else "fake" for axis in NODE_AXES}
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=NODE_AXES, backend_override=backends)
    register_node_groups(
        experts,
        node=mesh.get_group("place"),
        cross=mesh.get_group("node"),
        host=f"node {dist.get_rank(world) // of_node}" if node_ranks else None,
    )


def connect_exchanges(dims: ParallelDims) -> None:
    """Send one number between all ranks of each group that this rank exchanges rows on.

    Does nothing where experts are not on several ranks, or the second time in a job.
    """
    experts = expert_mesh(dims, ["ep"]) if dims.ep_enabled else None
    if experts is None or dist.get_backend() in UNCOMPARED:
        return
    for group in exchange_groups(dims):
        _connect(group, experts.device_type)


def exchange_groups(dims: ParallelDims) -> list[dist.ProcessGroup]:
    """Return the groups that this rank exchanges rows on: of experts, and registered nodes."""
    experts = expert_mesh(dims, ["ep"]) if dims.ep_enabled else None
    if experts is None:
        return []
    nodes = node_groups_of(experts.get_group().group_name)
    names = (nodes.node, nodes.cross) if nodes else ()
    return [experts.get_group(), *map(dist.distributed_c10d._resolve_process_group, names)]


@functools.lru_cache(maxsize=3)
def _connect(group: dist.ProcessGroup, device_type: str) -> None:
    """Make a group's communicator and the connections to all its ranks, and wait for them."""
    sent = torch.full((group.size(),), dist.get_rank(), device=device_type)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    if got.tolist() != (ranks := dist.get_process_group_ranks(group)):
        raise RuntimeError(
            f"megamoe: each of ranks {ranks} sent its number to all of them, and rank "
            f"{dist.get_rank()} received {got.tolist()}: the links between these ranks are faulty"
        )


def node_shape(ep: int, etp: int, of_node: int) -> tuple[int, int]:
    """Return the number of nodes of an expert-parallel group, and of its ranks on each.

    Its ranks are every `etp`-th of `ep * etp` ranks that follow one another. Raises InvalidConfig
    where nodes of `of_node` ranks do not divide these, nor hold them.
    """
    together = ep * etp
    if of_node % together == 0:
        return 1, ep
    if together % of_node or of_node % etp:
        raise InvalidConfig(
            f"megamoe.nodes: nodes of {of_node} ranks neither divide nor contain the {together} "
            f"ranks that share experts (parallelism.expert_parallel_degree = {ep}, "
            f"expert_tensor_parallel_degree = {etp}); choose degrees that fit, or set "
            "megamoe.node_ranks to the number of ranks that share a node"
        )
    return together // of_node, of_node // etp


def ranks_of_machine(world: dist.ProcessGroup) -> int:
    """Return the number of ranks of each machine, gathered from all ranks."""
    own = os.environ.get("LOCAL_WORLD_SIZE", "")
    told = [own]
    if dist.get_backend(world) not in UNCOMPARED:
        told = [""] * dist.get_world_size(world)
        dist.all_gather_object(told, own, group=world)
    if len({*told}) > 1 or not told[0].isdecimal() or int(told[0]) < 1:
        raise InvalidConfig(
            f"megamoe.nodes: LOCAL_WORLD_SIZE is {', '.join(map(repr, sorted({*told})))}, but it "
            "must be the number of ranks of each machine; start the job by torchrun, or set "
            "megamoe.node_ranks to the number of ranks that share a node"
        )
    return int(told[0])


CHANNELS: Final = "NCCL_MAX_P2P_NCHANNELS"
"""Environment variable that limits the number of NCCL's channels between two GPUs of a machine."""
MOST_CHANNELS: Final = 32
"""Number of these channels where the variable allows as many."""
CHANNEL_BYTES: Final = 3.28e9 / (7 * MOST_CHANNELS)
"""Bytes that NCCL keeps per channel in a group of all-to-alls: at the first one those to seven of
eight H100s took 3.28 GB (github.com/NVIDIA/nccl/issues/1685)."""
NETWORK_BYTES: Final = 2**29
"""Bytes of the one buffer that it keeps for all ranks of other machines (nccl/issues/1450); this
size was seen on a B300 (nccl/issues/2363)."""


def exchange_buffers(dims: ParallelDims, options: MegaMoEConfig) -> int:
    """Return the bytes of the rank that keeps most: a collective call with one result."""
    groups = exchange_groups(dims)
    groups += [sequence_mesh(dims).get_group()] if dims.cp_enabled else []
    backend = dist.get_backend()
    has_nccl = "nccl" in backend  # or "cuda:nccl,cpu:gloo", where state is kept on the host
    if not groups or options.hardware == "cpu" or not (has_nccl or backend in UNCOMPARED):
        return 0
    of_machine = options.node_ranks or int(
        os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())
    )
    ranks = map(dist.get_process_group_ranks, groups)
    own = sum(buffers_of(members, dist.get_rank(), of_machine, channels()) for members in ranks)
    if backend in UNCOMPARED:
        return own
    largest = torch.tensor(own, device="cuda")
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def channels() -> int:
    """Return the number of channels that NCCL makes between two GPUs of a machine."""
    most = os.environ.get(CHANNELS, "")
    return min(MOST_CHANNELS, int(most)) if most.isdecimal() else MOST_CHANNELS


def buffers_of(
    ranks: Sequence[int], own: int, of_machine: int, num_channels: int = MOST_CHANNELS
) -> int:
    """Return the bytes that rank `own` of a group of all-to-alls keeps for it."""
    near = sum(one // of_machine == own // of_machine for one in ranks)
    far = NETWORK_BYTES if near < len(ranks) else 0
    return round((near - 1) * num_channels * CHANNEL_BYTES) + far
