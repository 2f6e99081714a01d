"""Let all ranks plan by one machine: to be called once, where process groups are made.

Contract
    A collective call on the default process group, before anything is compiled. After it
    `hardware = "detect"` means the same profile on every rank.
    Without the call each rank plans by its own machine; ranks that then decide differently run the
    program as it is written.

The torchtitan recipe makes the call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

import torch.distributed as dist

from moe_compile.hardware import HardwareProfile, load_profile
from moe_compile.hardware.detect import agree_on_profile, own_profile
from moe_compile.runtime.rank_store import UNCOMPARED, default_store

LOG: Final = logging.getLogger(__name__)


class _Done:
    """The store of the process group whose ranks agreed."""

    store: Any = None


def agree_on_machines() -> None:
    """Gather the machine profiles of all ranks; plan by the slowest of them on all ranks.

    Does nothing without a process group, or the second time in one. A mixed cluster is logged.
    """
    store = default_store()
    if store is None or store is _Done.store or dist.get_backend() in UNCOMPARED:
        return
    _Done.store = store
    own = own_profile()
    found: list[Any] = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    chosen = slowest(found)
    agree_on_profile(chosen)
    profiles = sorted(set(found))
    if len(profiles) > 1 and dist.get_rank() == 0:
        LOG.warning(
            "megamoe: the ranks run on different machines (%s): all ranks plan for %s, which has "
            "the slowest link",
            ", ".join(profiles),
            chosen,
        )


def slowest(profiles: Iterable[str]) -> str:
    """Return the name of the profile with the slowest link, then memory, then matmul."""
    return min(profiles, key=lambda name: _rates(load_profile(name)))


def _rates(profile: HardwareProfile) -> tuple[float, float, float, str]:
    return (
        profile.link_gb_per_s,
        profile.memory_gb_per_s,
        profile.matmul_tflops,
        profile.name,
    )
