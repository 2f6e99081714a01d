"""Process groups that generated programs use beside the default one, made once in a process.

Contract
    Both ranks call these in the same order. A default group that is ended takes them with it.
"""

from __future__ import annotations

from functools import cache

import torch.distributed as dist


@cache
def second_group() -> dist.ProcessGroup:
    """Return another group of all ranks."""
    return dist.new_group(list(range(dist.get_world_size())))


@cache
def own_group() -> dist.ProcessGroup:
    """Return the group of this rank alone: its name differs from rank to rank."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]
