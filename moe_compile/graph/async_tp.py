"""Inductor's async TP: whether this process has the means for it, and what it did to a graph.

Contract
    Probes what torch offers, never its version. Inductor splits the product next to an all-gather
    or a reduce-scatter along its rows and sends over symmetric memory meanwhile
    (torch/_inductor/fx_passes/micro_pipeline_tp.py); nothing of that is rewritten here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.fx as fx

from moe_compile.graph.query import overload_name

SETTING: Final = "_micro_pipeline_tp"
"""Inductor's option that switches its pass on."""
FUSED: Final = ("symm_mem::fused_", "symm_mem::_fused_")
"""How the names of its fused operators begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncTPMeans:
    """What async TP needs, as far as this process has it."""

    has_setting: bool = False
    """Whether Inductor has the pass."""
    has_nccl: bool = False
    """Whether torch was built with NCCL, which Inductor's pass asks for."""
    enabled_groups: frozenset[str] = frozenset()
    """Names of process groups that symmetric memory is enabled for."""


class _Agreed:
    """What all ranks have; until they agreed, whatever this process has."""

    means: AsyncTPMeans = AsyncTPMeans(has_setting=True, has_nccl=True)


def agree_on_means(means: AsyncTPMeans) -> None:
    """From now on nothing counts that `means` lacks; of groups it says nothing.

    Enabling a group is a collective call, so ranks cannot differ in that.
    """
    _Agreed.means = means


def probe_means(groups: Iterable[str]) -> AsyncTPMeans:
    """Return what this process has for async TP over `groups`, and all others have as well."""
    try:
        memory = importlib.import_module("torch.distributed._symmetric_memory")
        enabled = frozenset(g for g in groups if memory.is_symm_mem_enabled_for_group(g))
    except (ImportError, AttributeError):
        enabled = frozenset()
    return AsyncTPMeans(
        has_setting=_Agreed.means.has_setting and SETTING in inductor_config.get_config_copy(),
        has_nccl=_Agreed.means.has_nccl and dist.is_available() and dist.is_nccl_available(),
        enabled_groups=enabled,
    )


def count_fused(graph: fx.Graph) -> int:
    """Return how many products of `graph` were fused with their collective."""
    return sum(overload_name(node).startswith(FUSED) for node in graph.nodes)
