"""The blocks of a job's model, one graph of each kind, and how the model calls them.

Contract
    Tensors are on the meta device; attention is one fused operator, or FlexAttention.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_integration.block_groups import block_groups
from torchtitan_integration.dry_run.attention import fused_attention
from torchtitan_integration.dry_run.world import FakeRank


def kind_of(block: nn.Module) -> str:
    """Return what a block has that others of its model may not have."""
    has_window = getattr(block, "use_sliding_attention", False)
    experts = "with experts" if block.moe_enabled else "without experts"
    return f"{experts} and a sliding window" if has_window else experts


def kind_of_graph(blocks: Sequence[nn.Module]) -> str:
    """Return which blocks one graph has: "block with experts", "blocks: 2 with experts"."""
    if len(blocks) == 1:
        return f"block {kind_of(blocks[0])}"
    runs = itertools.groupby(kind_of(block) for block in blocks)
    return "graph of blocks: " + ", ".join(f"{len(list(run))} {kind}" for kind, run in runs)


def one_graph_of_each_kind(rank: FakeRank) -> nn.Module:
    """Return the model with the first graph of each kind, in the type the GPUs compute in.

    Only the last graph may have fewer blocks: what is left makes the same graphs again.
    """
    model = rank.build_model()
    names = {block: name for name, block in model.layers.items()}
    kinds: set[str] = set()
    for blocks in block_groups(model, rank.job):
        is_known = kind_of_graph(blocks) in kinds
        kinds.add(kind_of_graph(blocks))
        for block in blocks:
            if is_known:
                del model.layers[names[block]]
            elif rank.model_args.attn_type == "sdpa":
                block.attention.inner_attention.forward = fused_attention
    dtype = TORCH_DTYPE_MAP[rank.job.training.mixed_precision_param]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def calls_of_graphs(
    model: nn.Module, rank: FakeRank, masks: Any = None
) -> list[tuple[list[nn.Module], tuple[Any, ...]]]:
    """Return the blocks of each graph with the arguments the model calls the first of them with.

    The `compiled` of the first is its forward as it was laid out; forwards are put out of use.
    `masks` take the place of the block masks that the model would make for FlexAttention on the
    meta device.
    """
    calls: list[tuple[list[nn.Module], tuple[Any, ...]]] = []

    def record(blocks: list[nn.Module]) -> Callable[..., Any]:
        def forward(*arguments: Any) -> Any:
            calls.append((blocks, arguments))
            return arguments[0]

        return forward

    def hand_on(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return hidden

    for blocks in block_groups(model, rank.job):
        first, *others = blocks
        first.compiled, first.forward = first.forward, record(blocks)
        for block in others:
            block.forward = hand_on
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
