"""torchtitan's validator, for every model and every kernel of attention.

Contract
    `KernelValidator` has torchtitan's losses; torchtitan's own DeepSeek-V3 and gpt_oss have no
    validator.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torchtitan.components.validate import Validator
from torchtitan.distributed import ParallelDims

MASKED: Final = ("flex", "varlen")
"""Kernels of attention that are given a mask."""


class KernelValidator(Validator):  # type: ignore[misc]
    """Makes masks for kernels that take one, as torchtitan's trainer does.

    torchtitan's validator makes them wherever a model knows how to, and its DeepSeek-V3 and Llama 4
    on SDPA end in an assertion when they are given one. With context parallelism it divides each
    rank's loss by the tokens of one part of the sequence, not of all of it.
    """

    def __init__(self, *, parallel_dims: ParallelDims, loss_fn: Any, **others: Any) -> None:
        """Validate as torchtitan does."""
        super().__init__(
            parallel_dims=parallel_dims,
            loss_fn=lambda *given: loss_fn(*given) / parallel_dims.cp,
            **others,
        )

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validate; under context parallelism torchtitan asks each model for Llama's rotations."""
        for part in model_parts if self.parallel_dims.cp_enabled else ():
            if not hasattr(part, "freqs_cis"):
                part.freqs_cis = part.rope_cache
        super().validate(model_parts, step)

    def post_dataloading_process(
        self,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
        model_parts: list[nn.Module],
    ) -> Any:
        """Return what torchtitan's validator does, without a mask for SDPA."""
        masked = model_parts[0].model_args.attn_type in MASKED
        makers = model_parts if masked else [_NoMask()]
        return super().post_dataloading_process(input_dict, labels, makers)


class _NoMask:
    """In a model's place: torchtitan takes a TypeError for a model that knows no masks."""

    def get_attention_masks(self, **_: Any) -> None:
        raise TypeError("SDPA takes no mask")
