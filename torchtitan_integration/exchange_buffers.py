"""Bytes that NCCL keeps on a GPU for the groups that rows and heads are exchanged on.

Contract
    Counted by what others measured on H100s; nothing where exchanges are not NCCL's. Outside
    torch's allocator, so that no figure of torch's shows them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from moe_compile.config import MegaMoEConfig
from moe_compile.runtime.rank_store import UNCOMPARED
from torchtitan_integration.node_mesh import exchange_groups
from torchtitan_integration.sequence_mesh import sequence_mesh

CHANNELS: Final = 32
"""Of NCCL between two GPUs of a machine, where NCCL_MAX_P2P_NCHANNELS does not say fewer."""
CHANNEL_BYTES: Final = 3.28e9 / (7 * CHANNELS)
"""What NCCL keeps for each of them in a group of all-to-alls: at the first one those to seven of
eight H100s took 3.28 GB (github.com/NVIDIA/nccl/issues/1685)."""
NETWORK_BYTES: Final = 2**29
"""What it keeps for all ranks of other machines together, whose buffer is one (nccl/issues/1450);
this size was seen on a B300 (nccl/issues/2363)."""


def exchange_buffers(dims: ParallelDims, options: MegaMoEConfig) -> int:
    """Return the bytes of the rank that keeps most: all ranks ask together, and get the same."""
    groups = exchange_groups(dims)
    groups += [sequence_mesh(dims).get_group()] if dims.cp_enabled else []
    backend = dist.get_backend()
    if not groups or options.hardware == "cpu" or backend not in ("nccl", *UNCOMPARED):
        return 0
    of_machine = options.node_ranks or int(
        os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())
    )
    most = os.environ.get("NCCL_MAX_P2P_NCHANNELS", "")
    channels = min(CHANNELS, int(most)) if most.isdecimal() else CHANNELS
    ranks = map(dist.get_process_group_ranks, groups)
    own = sum(buffers_of(members, dist.get_rank(), of_machine, channels) for members in ranks)
    if backend in UNCOMPARED:
        return own
    largest = torch.tensor(own, device="cuda")
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def buffers_of(ranks: Sequence[int], own: int, of_machine: int, channels: int = CHANNELS) -> int:
    """Return the bytes that rank `own` of a group of all-to-alls keeps for it."""
    near = sum(one // of_machine == own // of_machine for one in ranks)
    far = NETWORK_BYTES if near < len(ranks) else 0
    return round((near - 1) * channels * CHANNEL_BYTES) + far
