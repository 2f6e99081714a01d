"""The blocks of a job's model, one of each kind, and how the model calls them.

Contract
    Tensors are on the meta device; attention is one fused operator, or FlexAttention.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_integration.dry_run.attention import fused_attention
from torchtitan_integration.dry_run.world import FakeRank


def kind_of(block: nn.Module) -> str:
    """Return what a block has that others of its model may not have."""
    has_window = getattr(block, "use_sliding_attention", False)
    experts = "with experts" if block.moe_enabled else "without experts"
    return f"{experts} and a sliding window" if has_window else experts


def one_block_of_each_kind(rank: FakeRank) -> nn.Module:
    """Return the model with the first block of each kind, in the type the GPUs compute in."""
    model = rank.build_model()
    kinds: set[str] = set()
    for name, block in list(model.layers.items()):
        if kind_of(block) in kinds:
            del model.layers[name]
        kinds.add(kind_of(block))
        if rank.model_args.attn_type == "sdpa":
            block.attention.inner_attention.forward = fused_attention
    dtype = TORCH_DTYPE_MAP[rank.job.training.mixed_precision_param]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def calls_of_blocks(
    model: nn.Module, rank: FakeRank, masks: Any = None
) -> list[tuple[nn.Module, tuple[Any, ...]]]:
    """Return each block with the arguments the model calls it with.

    Its `compiled` is its forward as it was laid out; its forward is put out of use. `masks` take
    the place of the block masks that the model would make for FlexAttention on the meta device.
    """
    calls: list[tuple[nn.Module, tuple[Any, ...]]] = []

    def record(block: nn.Module) -> Callable[..., Any]:
        def forward(*arguments: Any) -> Any:
            calls.append((block, arguments))
            return arguments[0]

        return forward

    for block in model.layers.values():
        block.compiled, block.forward = block.forward, record(block)
    settings = rank.job.training
    batch = settings.local_batch_size
    if rank.dims.pp_enabled:
        batch = rank.job.parallelism.pipeline_parallel_microbatch_size
    part = (batch, settings.seq_len // rank.dims.cp)
    tokens = torch.zeros(part, dtype=torch.int64, device="meta")
    positions = torch.zeros(part, dtype=torch.int32, device="meta")
    given: dict[str, Any] = {"positions": positions} if rank.dims.cp_enabled else {}
    if rank.model_args.attn_type == "flex":
        given["attention_masks"] = masks or _masks(model, tokens)
    model(tokens, **given)
    return calls


def _masks(model: nn.Module, tokens: torch.Tensor) -> Any:
    """Return the block masks of FlexAttention as the model makes them of a batch of `tokens`."""
    tokenizer = types.SimpleNamespace(eos_id=0)  # all that a model asks of it
    with torch.device(tokens.device):
        return model.get_attention_masks(tokens, tokenizer)
