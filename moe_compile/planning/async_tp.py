"""Whether attention under tensor parallelism is handed to Inductor's async TP.

Contract
    A function of the options, of devices and groups of the graph, of what the program enabled, a
    collective call, and of what this torch was built with: the same on every rank once ranks agreed
    on it (moe_compile/group_setup.py). Where they did not, the decision is among those that ranks
    compare before they run.
"""

from __future__ import annotations

import enum

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.async_tp import AsyncTPMeans
from moe_compile.planning.state import AttentionVerdict


class AsyncTP(enum.Enum):
    """What became of the collectives around such attention. Values are what reports print."""

    HANDED = "handed to Inductor's async TP: the sum over ranks is taken in another order"
    NOT_ASKED = "not handed to Inductor's async TP: the option async_tp is off"
    NO_CODE = "not handed to Inductor's async TP: codegen is not Inductor's"
    NO_SETTING = "not handed to Inductor's async TP: this torch does not have it"
    NOT_CUDA = "not handed to Inductor's async TP: its tensors are not on a CUDA device"
    NO_NCCL = "not handed to Inductor's async TP: this torch was built without NCCL"
    NOT_ENABLED = (
        "not handed to Inductor's async TP: symmetric memory is not enabled for its group; call "
        "torch.distributed._symmetric_memory.enable_symm_mem_for_group"
    )


def decide_async_tp(
    config: MegaMoEConfig, attention: AttentionVerdict, means: AsyncTPMeans
) -> AsyncTP:
    """Return whether `attention`, which stands under tensor parallelism, is handed over."""
    missing = (
        (not config.async_tp, AsyncTP.NOT_ASKED),
        (config.codegen != "inductor", AsyncTP.NO_CODE),
        (not means.has_setting, AsyncTP.NO_SETTING),
        (attention.device != "cuda", AsyncTP.NOT_CUDA),
        (not means.has_nccl, AsyncTP.NO_NCCL),
        (not means.enabled_groups.issuperset(attention.tp_groups), AsyncTP.NOT_ENABLED),
    )
    return next((why for lacks, why in missing if lacks), AsyncTP.HANDED)
