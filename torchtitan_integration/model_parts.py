"""What torchtitan does differently for each of its MoE models, under one signature.

Contract
    Tensor-parallel styles of all that is not MoE are torchtitan's own, and so are its lists of
    operators that selective activation checkpointing saves; `expert_layout` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3.infra import parallelize as deepseek_v3
from torchtitan.models.gpt_oss.infra import parallelize as gpt_oss
from torchtitan.models.gpt_oss.infra.expert_parallel import (
    GptossExpertTensorParallel,
    GptossTensorParallel,
)
from torchtitan.models.llama4.infra import parallelize as llama4
from torchtitan.models.qwen3.infra import parallelize as qwen3

from moe_compile.errors import InvalidConfig
from torchtitan_integration.expert_bias import run_as_one_graph
from torchtitan_integration.expert_layout import OF_MOST, ExpertStyles, apply_experts
from torchtitan_integration.expert_mesh import expert_mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParts:
    """What a model has of its own."""

    module: ModuleType
    """torchtitan's module that lays the model out."""
    stock: Callable[..., nn.Module]
    """torchtitan's own parallelize function."""
    knows_cp: bool = True
    """Whether its tensor-parallel plan asks for context parallelism."""
    knows_async_tp: bool = False
    has_own_experts: bool = False
    """Whether its experts are gpt_oss's, with biases."""
    styles: ExpertStyles = OF_MOST

    def apply_tp(
        self, model: nn.Module, mesh: DeviceMesh, *, loss_parallel: bool, has_cp: bool
    ) -> None:
        """Apply tensor and sequence parallelism to all that is not MoE."""
        settings: dict[str, Any] = {"cp_enabled": has_cp} if self.knows_cp else {}
        if self.knows_async_tp:
            settings["enable_async_tp"] = False
        self.module.apply_non_moe_tp(
            model,
            mesh,
            loss_parallel=loss_parallel,
            enable_float8_tensorwise_tp=False,
            **settings,
        )

    def prepare_experts(self, model: nn.Module) -> None:
        """Have experts that no graph can hold as they are written run otherwise; bits stay."""
        if self.has_own_experts:
            for block in model.layers.values():
                run_as_one_graph(block.moe.experts)

    def apply_experts(self, model: nn.Module, dims: ParallelDims) -> None:
        """Apply expert parallelism, and tensor parallelism of experts."""
        apply_experts(
            model,
            self.styles,
            tp=dims.get_optional_mesh("tp"),
            ep=expert_mesh(dims, ["ep"]),
            ep_and_etp=expert_mesh(dims, ["ep", "etp"]),
        )

    def saved_operators(self) -> set[Any]:
        """Return the operators whose results selective checkpointing ("op") keeps."""
        return set(self.module._op_sac_save_list)


PARTS: Final = {
    "deepseek_v3": ModelParts(module=deepseek_v3, stock=deepseek_v3.parallelize_deepseekv3),
    "gpt_oss": ModelParts(
        module=gpt_oss,
        stock=gpt_oss.parallelize_gptoss,
        knows_cp=False,
        knows_async_tp=True,
        has_own_experts=True,
        styles=ExpertStyles(
            over_tp=GptossTensorParallel, over_ep_and_etp=GptossExpertTensorParallel
        ),
    ),
    "llama4": ModelParts(module=llama4, stock=llama4.parallelize_llama, knows_cp=False),
    "qwen3": ModelParts(module=qwen3, stock=qwen3.parallelize_qwen3, knows_async_tp=True),
}
"""By torchtitan's name of the model."""


def parts_of(model_name: str) -> ModelParts:
    """Return the parts of a model; raises InvalidConfig for one the recipe does not have."""
    if (parts := PARTS.get(model_name)) is None:
        raise InvalidConfig(f"model.name = {model_name!r}: the recipe has {sorted(PARTS)}")
    return parts
