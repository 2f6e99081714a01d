"""How a block's experts and its router lie on ranks: torchtitan's plan, with one rank's gradients.

Contract
    Gradients of the router and of the block's input are those of one rank, for any TP degree and
    any number of sequences. Without TP the plan is torchtitan's.

torchtitan 0.2.2 gets two of them wrong under TP; its next release mends the first:
    gate        scores leave the gate as plain tensors, whose gradient it takes for whole on each TP
                rank. A rank has the gradients of the rows that it sent, or of its share of the
                experts' columns: a term of a sum. Here the terms are added up.
    input       a rank sends the rows of one of the equal parts of all tokens, one sequence after
                another, but keeps the gradient of its slice of every sequence. Here tokens are
                gathered rank by rank, so that the part it sends is what it brought. Experts do not
                ask in which order tokens stand.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)
from torchtitan.distributed import NoParallel
from torchtitan.distributed.expert_parallel import (
    ExpertParallel,
    ExpertTensorParallel,
    ReordererSequenceParallel,
    TensorParallel,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertStyles:
    """How a model's experts are divided by columns."""

    over_tp: type[ParallelStyle] = TensorParallel
    over_ep_and_etp: type[ParallelStyle] = ExpertTensorParallel


OF_MOST: Final = ExpertStyles()


class Gate(NoParallel):
    """A router's gate that is whole on every rank, whose scores' gradients are `placement`."""

    def __init__(self, placement: Placement) -> None:
        """Say whether ranks have the gradient of the scores whole, or a term of it each."""
        super().__init__(use_local_output=False)
        self._placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(functools.partial(_local_scores, self._placement))
        return module


def _local_scores(
    placement: Placement, gate: nn.Module, inputs: Any, scores: DTensor
) -> torch.Tensor:
    del gate, inputs
    return scores.to_local(grad_placements=(placement,))


class RankByRank(PrepareModuleInputOutput):
    """A layer that has the tokens of all TP ranks, those of each rank together, in their order.

    Shapes: a rank brings and keeps `[sequences, positions / ranks, D]`, its slice of each sequence;
    the layer sees `[ranks * sequences, positions / ranks, D]`.
    """

    def __init__(self) -> None:
        """Gather along the first dimension, and sum what returns into its parts."""
        super().__init__(
            input_layouts=(Shard(0),),
            desired_input_layouts=(Replicate(),),
            use_local_input=True,
            output_layouts=(Partial(),),
            desired_output_layouts=(Shard(0),),
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(_own_part)
        return super()._apply(module, device_mesh)


def _own_part(layer: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    del layer
    (x,) = inputs
    return (x.to_local() if isinstance(x, DTensor) else x,)


def apply_experts(
    model: nn.Module,
    styles: ExpertStyles,
    *,
    tp: DeviceMesh | None,
    ep: DeviceMesh | None,
    ep_and_etp: DeviceMesh | None,
) -> None:
    """Apply expert parallelism, and tensor parallelism of experts and what is around them.

    Meshes are those of the axes in use; at least one of `tp` and `ep` is.
    """
    if ep is None:
        mesh, style = tp, styles.over_tp
    elif ep_and_etp is None:
        mesh, style = ep, ExpertParallel
    else:
        mesh, style = ep_and_etp, styles.over_ep_and_etp
    for block in model.layers.values():
        if not block.moe_enabled:
            continue
        if tp is not None:
            sends_part = style is ExpertParallel
            parallelize_module(block, tp, _tensor_plan(block.moe, sends_part=sends_part))
        parallelize_module(block.moe.experts, mesh, style())


def _tensor_plan(moe: nn.Module, *, sends_part: bool) -> dict[str, ParallelStyle]:
    """Return the plan of one layer; with `sends_part` each TP rank sends rows of its own tokens."""
    # experts divided by columns return terms of sums, and scores that multiply these have terms of
    # gradients; scores that multiply what experts are given have the gradient that torchtitan sums
    is_whole = moe.score_before_experts and not sends_part
    plan: dict[str, ParallelStyle] = {
        "moe": RankByRank(),
        "moe.router.gate": Gate(Replicate() if is_whole else Partial()),
    }
    if sends_part:
        plan["moe.reorderer"] = ReordererSequenceParallel()
    if moe.shared_experts is not None:
        plan |= {
            "moe.shared_experts.w1": ColwiseParallel(),
            "moe.shared_experts.w2": RowwiseParallel(output_layouts=Partial()),
            "moe.shared_experts.w3": ColwiseParallel(),
        }
    return plan
