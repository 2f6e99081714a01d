"""Let all ranks plan by one machine: to be called once, where process groups are made.

Contract
    A collective call on the default process group, before anything is compiled. After it
    `hardware = "detect"` means the same profile on every rank, and a rank whose torch lacks what
    async TP takes counts as all ranks lacking it.
    Without the call each rank goes by its own machine; ranks that then decide differently run the
    program as it is written.

The torchtitan recipe makes the call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from moe_compile.graph.async_tp import AsyncTPMeans, agree_on_means, probe_means
from moe_compile.hardware import HardwareProfile, load_profile
from moe_compile.hardware.detect import agree_on_profile, own_profile
from moe_compile.runtime.rank_store import UNCOMPARED, default_store

LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What one rank found of its own machine."""

    profile: str
    """Name of a hardware profile."""
    has_setting: bool
    has_nccl: bool
    """As in AsyncTPMeans."""


class _Done:
    """The store of the process group whose ranks agreed."""

    store: Any = None


def agree_on_machines() -> None:
    """Gather what each rank found of its machine; plan by the least of it on all ranks.

    Does nothing without a process group, or the second time in one. A mixed cluster is logged.
    """
    store = default_store()
    if store is None or store is _Done.store or dist.get_backend() in UNCOMPARED:
        return
    _Done.store = store
    own = _own_machine()
    found: list[Any] = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    chosen = agreed(found)
    agree_on_profile(chosen.profile)
    agree_on_means(AsyncTPMeans(has_setting=chosen.has_setting, has_nccl=chosen.has_nccl))
    profiles = sorted({machine.profile for machine in found})
    if len(profiles) > 1 and dist.get_rank() == 0:
        LOG.warning(
            "megamoe: the ranks' machines are %s: all plan for %s, the one with the slowest link",
            ", ".join(profiles),
            chosen.profile,
        )


def agreed(machines: Iterable[Machine]) -> Machine:
    """Return the machine that all ranks plan for: slowest by link, then memory, then matmul."""
    machines = list(machines)
    slowest = min(machines, key=lambda machine: _rates(load_profile(machine.profile)))
    return Machine(
        profile=slowest.profile,
        has_setting=all(machine.has_setting for machine in machines),
        has_nccl=all(machine.has_nccl for machine in machines),
    )


def _rates(profile: HardwareProfile) -> tuple[float, float, float, str]:
    return (
        profile.link_gb_per_s,
        profile.memory_gb_per_s,
        profile.matmul_tflops,
        profile.name,
    )


def _own_machine() -> Machine:
    means = probe_means(())
    return Machine(profile=own_profile(), has_setting=means.has_setting, has_nccl=means.has_nccl)
