"""Model sizes torchtitan 0.2.2 does not list, built from its own model code.

Contract
    `FLAVORS` maps torchtitan's name of a model to the flavors this recipe adds. Those called
    `debug_cpu` train on a laptop and keep grouped GEMMs, which torchtitan turns off below SM90.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from torchtitan.config import JobConfig
from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs, deepseekv3_args
from torchtitan.models.gpt_oss.model.args import GptOssModelArgs
from torchtitan.models.llama4 import TransformerModelArgs as Llama4ModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs
from torchtitan.protocols import BaseModelArgs

VOCAB_SIZE: Final = 2048
"""Vocabulary size of the debug models and of the tokenizer trained for them."""


class KeepsGroupedGemms:
    """Model arguments that stay as they are on a CPU; torchtitan's turn grouped GEMMs off."""

    moe_args: MoEArgs

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        """Take over a job's settings."""
        grouped = self.moe_args.use_grouped_mm
        super().update_from_config(job_config, **kwargs)  # type: ignore[misc]
        self.moe_args.use_grouped_mm = grouped


@dataclasses.dataclass
class DebugDeepSeekV3Args(KeepsGroupedGemms, DeepSeekV3ModelArgs):
    """DeepSeek-V3 for a CPU."""


@dataclasses.dataclass
class DebugLlama4Args(KeepsGroupedGemms, Llama4ModelArgs):
    """Llama 4 for a CPU."""


@dataclasses.dataclass
class DebugGptOssArgs(KeepsGroupedGemms, GptOssModelArgs):
    """gpt_oss for a CPU."""


DEBUG: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "dim": 128,
    "n_layers": 3,
    "n_heads": 4,
}
"""Arguments that the debug models share."""


def debug_deepseek_v3(**changes: Any) -> DebugDeepSeekV3Args:
    """Return a DeepSeek-V3 small enough to compile and train on a laptop; two of three layers MoE.

    `changes` replace its arguments.
    """
    sizes: dict[str, Any] = {
        "inter_dim": 256,
        "moe_inter_dim": 128,
        "n_dense_layers": 1,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mscale": 0.7,
        "moe_args": _debug_moe(num_shared_experts=1),
    }
    return DebugDeepSeekV3Args(**{**DEBUG, **sizes, **changes})


def debug_qwen3(**changes: Any) -> Qwen3ModelArgs:
    """Return a Qwen3 MoE of that size: all three layers MoE, grouped-query attention."""
    sizes: dict[str, Any] = {
        "hidden_dim": 256,
        "moe_inter_dim": 128,
        "n_kv_heads": 2,
        "head_dim": 32,
        "moe_enabled": True,
        "moe_args": _debug_moe(num_shared_experts=0, route_norm=True),
    }
    return Qwen3ModelArgs(**{**DEBUG, **sizes, **changes})


def debug_llama4(**changes: Any) -> DebugLlama4Args:
    """Return a Llama 4 of that size on SDPA: every second of four layers MoE."""
    routing = {"top_k": 1, "score_func": "sigmoid", "score_before_experts": True}
    moe = _debug_moe(num_shared_experts=1, **routing)
    sizes = {"n_layers": 4, "n_kv_heads": 2, "multiple_of": 64, "moe_args": moe}
    return DebugLlama4Args(**{**DEBUG, **sizes, **changes})


def debug_gpt_oss(**changes: Any) -> DebugGptOssArgs:
    """Return a gpt_oss of that size: three layers, two of them with a sliding window, all MoE."""
    sizes: dict[str, Any] = {
        "moe_inter_dim": 128,
        "n_kv_heads": 2,
        "head_dim": 32,
        "sliding_window_size": 32,
        "moe_args": _debug_moe(num_shared_experts=0, route_norm=True, gate_bias=True),
    }
    return DebugGptOssArgs(**{**DEBUG, **sizes, **changes})


def _debug_moe(**changes: Any) -> MoEArgs:
    routing = {"score_func": "softmax", "score_before_experts": False}
    return MoEArgs(**{"num_experts": 8, "top_k": 2, **routing, **changes})


def mixtral_8x7b() -> Qwen3ModelArgs:
    """Return Mixtral-8x7B (Jiang et al. 2024, table 1) in torchtitan's Qwen3 code.

    Its attention without query and key norms is Mixtral's; a softmax over all experts, normalised
    over the top two, is Mixtral's softmax over the top two. 46.7 B parameters. Two things differ:
    experts are balanced by torchtitan's bias on the choice, not by an auxiliary loss; and Mixtral's
    published weights name their experts differently from Qwen3's, so that they cannot be loaded.
    """
    experts = {"num_experts": 8, "num_shared_experts": 0, "top_k": 2}
    return _like_mixtral(experts, n_layers=32, vocab_size=32000, max_seq_len=32768)


def megascale_352b() -> Qwen3ModelArgs:
    """Return the 352 B model of MegaScale-MoE (table 2) in torchtitan's Qwen3 code.

    The paper gives layers, sizes, heads, experts and top-k; norms, routing function and RoPE are
    not stated there, and are Mixtral's here. The paper balances experts by an auxiliary loss and
    drops tokens over a capacity; here torchtitan's bias on the choice does, and none is dropped.
    """
    experts = {"num_experts": 32, "num_shared_experts": 1, "top_k": 3}
    return _like_mixtral(experts, n_layers=60, vocab_size=65536, max_seq_len=8192)


def _like_mixtral(experts: Mapping[str, int], **sizes: int) -> Qwen3ModelArgs:
    """Return a model with Mixtral's layer, which both papers have in common."""
    routing: Any = {"score_func": "softmax", "route_norm": True, "score_before_experts": False}
    return Qwen3ModelArgs(
        dim=4096,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        hidden_dim=14336,
        norm_eps=1e-5,
        rope_theta=1_000_000,
        qk_norm=False,
        moe_enabled=True,
        moe_inter_dim=14336,
        moe_args=MoEArgs(**experts, **routing),
        **sizes,
    )


def on_sdpa(flavor: str) -> DeepSeekV3ModelArgs:
    """Return torchtitan's DeepSeek-V3 `flavor` with causal SDPA, which context parallelism needs.

    torchtitan's own, which the recipes have, is on FlexAttention: its mask also ends at document
    boundaries, and cannot be divided with the sequence.
    """
    own = deepseekv3_args[flavor]
    return dataclasses.replace(own, attn_type="sdpa", attn_mask_type="causal")


FLAVORS: Final[Mapping[str, Mapping[str, BaseModelArgs]]] = {
    "deepseek_v3": {
        "debug_cpu": debug_deepseek_v3(),
        "16B_sdpa": on_sdpa("16B"),
        "671B_sdpa": on_sdpa("671B"),
    },
    "gpt_oss": {"debug_cpu": debug_gpt_oss()},
    "llama4": {"debug_cpu": debug_llama4()},
    "qwen3": {
        "debug_cpu": debug_qwen3(),
        "mixtral_8x7b": mixtral_8x7b(),
        "megascale_352b": megascale_352b(),
    },
}
