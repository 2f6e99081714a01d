"""Losses of training and validation, where torchtitan 0.2.2 divides or averages them wrongly.

Contract
    Values of the training loss stay as they are; its gradients are those of one rank, and so are
    `grad_norm` and `training.max_norm`.
    `KernelValidator` has torchtitan's losses, for every model and every kernel of attention;
    torchtitan's own DeepSeek-V3 and gpt_oss have no validator.

Two layouts need other gradients:
    pipeline    torchtitan divides a step's summed loss by its tokens, but the pipeline has run its
                backward pass on the sum by then: all gradients are as many times too large
    DDP alone   torchtitan's loss of a rank is its part of the mean already, and DDP averages
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import Validator
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from moe_compile.errors import InvalidConfig


def with_mean_gradients(
    loss: Callable[..., torch.Tensor], dims: ParallelDims, job: JobConfig
) -> Callable[..., torch.Tensor]:
    """Return `loss` with one rank's gradients on this layout."""
    summed_over = tokens_of_step(dims, job) if dims.pp_enabled else 1
    averaged_over = dims.dp_replicate if is_ddp_alone(dims) else 1
    if summed_over == averaged_over:
        return loss

    def mean_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        value = loss(*args, **kwargs)
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient * averaged_over / summed_over)
        return value

    return mean_loss


def is_ddp_alone(dims: ParallelDims) -> bool:
    """Whether ranks train whole models, whose gradients DDP averages."""
    return dims.dp_replicate_enabled and not dims.fsdp_enabled and not dims.ep_enabled


def tokens_of_step(dims: ParallelDims, job: JobConfig) -> int:
    """Return the tokens that all ranks train on between two steps of the optimizer."""
    sequences = job.training.global_batch_size
    if sequences < 0:
        sequences = job.training.local_batch_size * dims.dp_replicate * dims.dp_shard
    return sequences * job.training.seq_len


class EveryLabel:
    """A data loader of a pipeline's job; raises InvalidConfig for a label that the loss ignores.

    The mean is over all tokens of a step, whose number must be known before the first backward.
    """

    def __init__(self, loader: Any) -> None:
        """Read from `loader`, torchtitan's."""
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield the loader's batches."""
        for inputs, labels in self._loader:
            if bool((labels == IGNORE_INDEX).any()):
                raise InvalidConfig(
                    f"a batch has labels of {IGNORE_INDEX}, which the loss should ignore, but "
                    "with parallelism.pipeline_parallel_degree > 1 the loss is a mean over all "
                    "tokens of a step; write parallelism.pipeline_parallel_degree = 1, or use "
                    "text whose tokens all have labels"
                )
            yield inputs, labels

    def __getattr__(self, name: str) -> Any:
        """Return the loader's own attribute, as its state for checkpoints."""
        return getattr(self._loader, name)


MASKED: Final = ("flex", "varlen")
"""Kernels of attention that are given a mask."""


class KernelValidator(Validator):
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
        """Return the result of torchtitan's validator, without a mask for SDPA."""
        masked = model_parts[0].model_args.attn_type in MASKED
        makers = model_parts if masked else [_NoMask()]
        return super().post_dataloading_process(input_dict, labels, makers)


class _NoMask:
    """Stand-in for a model: torchtitan takes a TypeError for a model that knows no masks."""

    def get_attention_masks(self, **_: Any) -> None:
        raise TypeError("SDPA takes no mask")
