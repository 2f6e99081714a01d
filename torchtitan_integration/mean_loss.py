"""Gradients of the mean over a step's tokens, where torchtitan 0.2.2 makes those of something else.

Contract
    Values of the loss stay as they are; its gradients are those of one rank, and so are
    `grad_norm` and `training.max_norm`.

Two layouts need it:
    pipeline    torchtitan divides a step's summed loss by its tokens, but the pipeline has run its
                backward pass on the sum by then: all gradients are as many times too large
    DDP alone   torchtitan's loss of a rank is its part of the mean already, and DDP averages
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchtitan.components.loss import IGNORE_INDEX
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
    """Whether whole models are trained, and gradients averaged by DDP."""
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
        """Yield what the loader does."""
        for inputs, labels in self._loader:
            if bool((labels == IGNORE_INDEX).any()):
                raise InvalidConfig(
                    f"a batch has labels of {IGNORE_INDEX}, which the loss ignores: with "
                    "parallelism.pipeline_parallel_degree > 1 the loss is a mean over all tokens "
                    "of a step; write parallelism.pipeline_parallel_degree = 1, or use text whose "
                    "tokens all have labels"
                )
            yield inputs, labels

    def __getattr__(self, name: str) -> Any:
        """Return the loader's own, as the state that checkpoints hold."""
        return getattr(self._loader, name)
