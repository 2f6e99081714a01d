"""Blocks that follow one another as one compiled graph: `blocks_per_graph` in `[megamoe]`.

Contract
    Nothing is added to the model, so that modules, parameters and checkpoints keep their names.
    The first block of a group runs all of it, whoever calls it; each of the others returns its
    input, and raises where that is not the group's result. Groups are made of the blocks of a model
    or a pipeline stage, in order; the last may be shorter.

torchtitan's models call their blocks one after another, `for layer in self.layers.values()`, and
this loop stays. A list that yielded groups in place of blocks would hide the blocks from other code
that goes through it: the load balancing of torchtitan's optimizer, its initialisation, our metrics.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torchtitan.config import JobConfig

from moe_compile.errors import ContractViolation
from torchtitan_integration.job_config import options_of

Forward = Callable[..., torch.Tensor]


def block_groups(model: nn.Module, job: JobConfig) -> list[list[nn.Module]]:
    """Return the blocks of `model`, or of its pipeline stage, as the job groups them."""
    blocks = list(model.layers.values())
    number = options_of(job).blocks_per_graph
    return [blocks[first : first + number] for first in range(0, len(blocks), number)]


def forward_of(blocks: Sequence[nn.Module]) -> Forward:
    """Return a function that runs `blocks` in turn, each by the forward it has now."""
    return (
        blocks[0].forward
        if len(blocks) == 1
        else OneAfterAnother([block.forward for block in blocks]).forward
    )


def run_as_group(blocks: Sequence[nn.Module], forward: Forward) -> None:
    """Have the first of `blocks` run `forward`, which runs all, and the others pass it on."""
    first, *others = blocks
    if not others:
        first.forward = forward
        return
    handover = _Handover(forward)
    first.forward = handover.run
    for block in others:
        block.forward = handover.hand_on


class OneAfterAnother(nn.Module):
    """Runs forwards of blocks of a model, in which it has no place itself.

    A module, since Dynamo takes the parameters of a module's blocks for inputs of its graph: groups
    of one kind share a graph, as blocks do.
    """

    def __init__(self, forwards: Sequence[Forward]) -> None:
        """Run `forwards` in turn."""
        super().__init__()
        self.forwards = [*forwards]

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the last block's result; `args` and `kwargs` are those of every block."""
        for forward in self.forwards:
            hidden = forward(hidden, *args, **kwargs)
        return hidden


class _Handover:
    """Remembers a group's last result without keeping it alive."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._made: weakref.ref[torch.Tensor] | None = None

    def run(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the group."""
        made = self._forward(hidden, *args, **kwargs)
        self._made = weakref.ref(made)
        return made

    def hand_on(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return `hidden`, on which the first block of the group has run this block already."""
        del args, kwargs
        if self._made is None or self._made() is not hidden:
            raise ContractViolation(
                "with megamoe.blocks_per_graph > 1 each block must be called with the result of "
                "the block before it, and one was not; write blocks_per_graph = 1"
            )
        return hidden
