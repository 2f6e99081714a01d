"""Process groups that generated programs use beside the default one, made once for each of it.

Contract
    Both ranks call these in the same order. A default group that is made anew has new ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist


def second_group() -> dist.ProcessGroup:
    """Return another group of all ranks."""
    return _second_beside(dist.group.WORLD)


def own_group() -> dist.ProcessGroup:
    """Return the group of this rank alone: its name differs from rank to rank."""
    return _own_beside(dist.group.WORLD)


@cache
def _second_beside(default: Any) -> dist.ProcessGroup:
    return dist.new_group(list(range(default.size())))


@cache
def _own_beside(default: Any) -> dist.ProcessGroup:
    groups = [dist.new_group([rank]) for rank in range(default.size())]
    return groups[default.rank()]
