"""Sizes of published mixture-of-experts models, and counts of weights and operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from moe_compile.errors import InvalidConfig, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """One transformer with experts; sizes in elements."""

    name: str
    source: str
    num_layers: int
    width: int
    num_heads: int
    heads_per_kv: int
    expert_width: int
    """Width of a SwiGLU expert: three matrices `[width, expert_width]`."""
    num_experts: int
    top_k: int
    vocab_size: int
    num_shared: int = 0
    """Shared experts, in units of one routed expert."""
    head_size: int = 128
    attention_weights: int = 0
    """Weights of one layer, all projections; 0: query, key, value, output by the heads' sizes."""
    num_dense_layers: int = 0
    dense_width: int = 0
    max_nodes: int = 0
    """Nodes one token's experts may lie on; 0: any number."""
    seq_len: int = 8192
    """Sequence length of its published runs, in tokens; the default of simulations."""

    @property
    def head_width(self) -> int:
        """Return the width of all query heads."""
        return self.num_heads * self.head_size

    @property
    def kv_width(self) -> float:
        """Return the width of all keys, which is that of all values."""
        return self.head_width / self.heads_per_kv

    @property
    def plain_attention_weights(self) -> float:
        """Return the weights of query, key, value and output projections of one layer."""
        return self.width * (2 * self.head_width + 2 * self.kv_width)

    @property
    def layer_attention_weights(self) -> float:
        """Return the weights of attention of one layer."""
        return self.attention_weights or self.plain_attention_weights

    @property
    def expert_weights(self) -> int:
        """Return the weights of one expert."""
        return 3 * self.width * self.expert_width

    @property
    def num_moe_layers(self) -> int:
        """Return the layers with experts."""
        return self.num_layers - self.num_dense_layers

    @property
    def num_params(self) -> float:
        """Return all weights, embedding and head counted apart."""
        experts = self.num_moe_layers * (self.num_experts + self.num_shared) * self.expert_weights
        return self._dense_weights + experts + 2 * self.vocab_size * self.width

    def flops_per_token(self, seq_len: int, *, is_causal: bool = True) -> float:
        """Return operations of forward and backward per token, recomputation not counted.

        6 per weight used, and 12 * layers * head width * sequence for attention, half if causal.
        """
        experts = (self.top_k + self.num_shared) * self.expert_weights
        routed = self.num_moe_layers * (experts + self.width * self.num_experts)
        weights = self._dense_weights + routed + self.vocab_size * self.width
        attention = 12 * self.num_layers * self.head_width * seq_len
        return 6 * weights + attention * (0.5 if is_causal else 1.0)

    @property
    def _dense_weights(self) -> float:
        dense = self.num_dense_layers * 3 * self.width * self.dense_width
        return self.num_layers * self.layer_attention_weights + dense


def find_model(name: str) -> ModelShape:
    """Return the model called `name`; raise InvalidConfig with the nearest name."""
    if name not in MODELS:
        raise InvalidConfig(f"no model {name!r}.{nearest(name, MODELS)}")
    return MODELS[name]


MEGASCALE_TABLE_2: Final = "MegaScale-MoE (arXiv 2505.11432) table 2"
FOLDING: Final = "MoE Parallel Folding (arXiv 2504.14960) table 1"
QWEN3: Final = "Qwen3 technical report (arXiv 2505.09388), table 2; widths from the model's card"
DEEPSEEK_V3_MLA: Final = (
    7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
)
"""Latent attention of DeepSeek-V3: query down and up, key-value down and up, output."""

_SHAPES: Final = (
    ModelShape(
        name="352b",
        source=MEGASCALE_TABLE_2 + "; its one shared expert is inferred: with it parameters (352 "
        "billion) and MFU (32.48 % at 240 GPUs) come out as published, without it neither does",
        num_layers=60,
        width=4096,
        num_heads=32,
        heads_per_kv=4,
        expert_width=14336,
        num_experts=32,
        top_k=3,
        num_shared=1,
        vocab_size=65536,
    ),
    ModelShape(
        name="mixtral-8x7b",
        source=MEGASCALE_TABLE_2,
        num_layers=32,
        width=4096,
        num_heads=32,
        heads_per_kv=4,
        expert_width=14336,
        num_experts=8,
        top_k=2,
        vocab_size=32000,
    ),
    ModelShape(
        name="mixtral-8x22b",
        source=MEGASCALE_TABLE_2,
        num_layers=56,
        width=6144,
        num_heads=48,
        heads_per_kv=6,
        expert_width=16384,
        num_experts=8,
        top_k=2,
        vocab_size=32000,
    ),
    ModelShape(
        name="hunyuan-large",
        source=MEGASCALE_TABLE_2,
        num_layers=64,
        width=6400,
        num_heads=80,
        heads_per_kv=10,
        head_size=80,
        expert_width=18304,
        num_experts=16,
        top_k=1,
        vocab_size=128512,
    ),
    ModelShape(
        name="phi-3.5-moe",
        source=MEGASCALE_TABLE_2,
        num_layers=32,
        width=4096,
        num_heads=32,
        heads_per_kv=4,
        expert_width=6400,
        num_experts=16,
        top_k=2,
        vocab_size=32064,
    ),
    ModelShape(
        name="deepseek-moe-16b",
        source=MEGASCALE_TABLE_2 + "; two shared experts as in DeepSeekMoE (arXiv 2401.06066)",
        num_layers=28,
        width=2048,
        num_heads=16,
        heads_per_kv=1,
        expert_width=1408,
        num_experts=64,
        top_k=6,
        num_shared=2,
        vocab_size=102400,
    ),
    ModelShape(
        name="mixtral-8x22b-g8t8",
        source=FOLDING,
        num_layers=56,
        width=6144,
        num_heads=48,
        heads_per_kv=6,
        expert_width=2048,
        num_experts=64,
        top_k=8,
        vocab_size=32000,
        seq_len=4096,
    ),
    ModelShape(
        name="qwen2-57b-a14b",
        source=FOLDING,
        num_layers=28,
        width=3584,
        num_heads=28,
        heads_per_kv=7,
        expert_width=2560,
        num_experts=64,
        top_k=8,
        num_shared=8,
        vocab_size=151936,
        seq_len=4096,
    ),
    ModelShape(
        name="deepseek-v3",
        source="DeepSeek-V3 report (arXiv 2412.19437) section 4.2, and one layer more for "
        "multi-token prediction; heads count as 160 wide, the mean of 192 for queries and keys "
        "and 128 for values",
        num_layers=62,
        width=7168,
        num_heads=128,
        heads_per_kv=1,
        head_size=160,
        attention_weights=DEEPSEEK_V3_MLA,
        expert_width=2048,
        num_experts=256,
        top_k=8,
        num_shared=1,
        num_dense_layers=3,
        dense_width=18432,
        max_nodes=4,
        vocab_size=129280,
        seq_len=4096,
    ),
    ModelShape(
        name="qwen3-235b",
        source=QWEN3,
        num_layers=94,
        width=4096,
        num_heads=64,
        heads_per_kv=16,
        expert_width=1536,
        num_experts=128,
        top_k=8,
        vocab_size=151936,
        seq_len=4096,
    ),
    ModelShape(
        name="qwen3-30b",
        source=QWEN3,
        num_layers=48,
        width=2048,
        num_heads=32,
        heads_per_kv=8,
        expert_width=768,
        num_experts=128,
        top_k=8,
        vocab_size=151936,
        seq_len=4096,
    ),
)
MODELS: Final[Mapping[str, ModelShape]] = {shape.name: shape for shape in _SHAPES}
"""Name on the command line -> model."""
TABLE_2: Final = tuple(shape for shape in _SHAPES if shape.source.startswith(MEGASCALE_TABLE_2))
