"""Differences between torchtitan's MoE models, and the layout of experts and router on ranks.

Contract
    Tensor-parallel styles of all that is not MoE are torchtitan's own, and so are its lists of
    operators that selective activation checkpointing saves.
    Gradients of the router and of the block's input are those of one rank, for any TP degree and
    any number of sequences. Without TP the plan is torchtitan's.
    Values and gradients of gpt_oss's experts, by grouped GEMMs as one graph, are those of
    torchtitan's `_run_experts_grouped_mm`, bit for bit.

torchtitan 0.2.2 gets two gradients wrong under TP; its next release mends the first:
    gate        scores leave the gate as plain tensors, whose gradient it takes for whole on each TP
                rank. A rank has the gradients of the rows that it sent, or of its share of the
                experts' columns: a term of a sum. Here the terms are added up.
    input       a rank sends the rows of one of the equal parts of all tokens, one sequence after
                another, but keeps the gradient of its slice of every sequence. Here tokens are
                gathered rank by rank, so that the part it sends is its own. Experts do not ask in
                which order tokens stand.

torchtitan's grouped GEMMs of gpt_oss read on the host how many rows no expert has, and branch on
it, which no graph can hold; here each row finds its expert by its place, and nothing is read. Ranks
that divide an expert's columns each add their share of its second bias. torchtitan 0.2.2 adds the
whole of it on each rank where these ranks also divide the experts.

Shapes: rows `x` `[R, D]`, sorted by expert, then rows of no expert; counts `[E]`; biases `[E, F]`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
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
from torchtitan.distributed import NoParallel, ParallelDims
from torchtitan.distributed.expert_parallel import (
    ExpertParallel,
    ExpertTensorParallel,
    ReordererSequenceParallel,
    TensorParallel,
)
from torchtitan.models.deepseek_v3.infra import parallelize as deepseek_v3
from torchtitan.models.gpt_oss.infra import parallelize as gpt_oss
from torchtitan.models.gpt_oss.infra.expert_parallel import (
    GptossExpertTensorParallel,
    GptossTensorParallel,
)
from torchtitan.models.gpt_oss.model.moe import (
    GptOssGroupedExperts,
    ScaleBiasForward,
    _run_experts_for_loop,
    indices_padding_wrapper,
    swiglu,
)
from torchtitan.models.llama4.infra import parallelize as llama4
from torchtitan.models.qwen3.infra import parallelize as qwen3

from moe_compile.errors import InvalidConfig
from torchtitan_integration.meshes import expert_mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertStyles:
    """Parallel styles that divide a model's experts by columns."""

    over_tp: type[ParallelStyle] = TensorParallel
    over_ep_and_etp: type[ParallelStyle] = ExpertTensorParallel


OF_MOST: Final = ExpertStyles()


class Gate(NoParallel):
    """A router's gate that is whole on every rank, whose scores' gradients are `placement`."""

    def __init__(self, placement: Placement) -> None:
        """Take the placement: each rank has the scores' gradient whole, or a term of it."""
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
    forgets_splits: bool = False,
) -> None:
    """Apply expert parallelism, and tensor parallelism of experts and their surroundings.

    Meshes are those of the axes in use; at least one of `tp` and `ep` is. `forgets_splits`: the
    sizes of exchanges are not kept beyond the layer, so that no graph returns them.
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
        made = forgetting(style) if forgets_splits and issubclass(style, ExpertParallel) else style
        parallelize_module(block.moe.experts, mesh, made())


def forgetting(style: type[ExpertParallel]) -> type[ExpertParallel]:
    """Return `style`, which torchtitan has keep the sizes of a layer's exchanges, without them."""

    class Forgetting(style):
        def _token_combine(self, mod: Any, routed_output: Any, device_mesh: Any) -> torch.Tensor:
            combined: torch.Tensor = super()._token_combine(mod, routed_output, device_mesh)
            self.input_splits = self.output_splits = None
            self.input_shape = self.permuted_indices = None
            return combined

    return Forgetting


def _tensor_plan(moe: nn.Module, *, sends_part: bool) -> dict[str, ParallelStyle]:
    """Return the plan of one layer; with `sends_part` each TP rank sends rows of its own tokens."""
    # experts divided by columns return terms of sums, and scores that multiply them have terms of
    # gradients; scores that multiply the experts' input have the gradient that torchtitan sums
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParts:
    """Properties and parallel styles of one model."""

    module: ModuleType
    """torchtitan's module that lays the model out."""
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
        """Replace the forward of experts that no graph can hold by another of equal bits."""
        if self.has_own_experts:
            for block in model.layers.values():
                run_as_one_graph(block.moe.experts)

    def apply_experts(
        self, model: nn.Module, dims: ParallelDims, *, forgets_splits: bool = False
    ) -> None:
        """Apply expert parallelism, and tensor parallelism of experts."""
        apply_experts(
            model,
            self.styles,
            tp=dims.get_optional_mesh("tp"),
            ep=expert_mesh(dims, ["ep"]),
            ep_and_etp=expert_mesh(dims, ["ep", "etp"]),
            forgets_splits=forgets_splits,
        )

    def saved_operators(self) -> set[Any]:
        """Return the operators whose results selective checkpointing ("op") keeps."""
        return set(self.module._op_sac_save_list)


PARTS: Final = {
    "deepseek_v3": ModelParts(module=deepseek_v3),
    "gpt_oss": ModelParts(
        module=gpt_oss,
        knows_cp=False,
        knows_async_tp=True,
        has_own_experts=True,
        styles=ExpertStyles(
            over_tp=GptossTensorParallel, over_ep_and_etp=GptossExpertTensorParallel
        ),
    ),
    "llama4": ModelParts(module=llama4, knows_cp=False),
    "qwen3": ModelParts(module=qwen3, knows_async_tp=True),
}
"""Parts of each model, by torchtitan's name of it."""


def parts_of(model_name: str) -> ModelParts:
    """Return the parts of a model; raises InvalidConfig for one the recipe does not have."""
    if (parts := PARTS.get(model_name)) is None:
        raise InvalidConfig(f"model.name = {model_name!r}: the recipe has {sorted(PARTS)}")
    return parts


def run_as_one_graph(experts: GptOssGroupedExperts) -> None:
    """Have `experts` run without that branch; those without grouped GEMMs have none.

    To be called before they are laid out: torchtitan's code around them still runs.
    """
    experts.forward = functools.partial(_run, experts)


def _run(experts: GptOssGroupedExperts, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the result of `GptOssGroupedExperts.forward`, on the same meshes."""
    first = experts.mlp1_weight
    mesh = first.device_mesh if isinstance(first, DTensor) else None
    axes = () if mesh is None else mesh.mesh_dim_names
    parameters = (first, experts.mlp1_bias, experts.mlp2_weight, experts.mlp2_bias)
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    num_shards = 1
    if mesh is not None:
        for place, axis in enumerate(axes):  # Dynamo follows no product of a generator
            num_shards *= mesh.size(place) if axis in ("tp", "etp") else 1
    if not experts.use_grouped_mm:
        run = _run_experts_for_loop
    else:
        run = _grouped if "ep" in axes else indices_padding_wrapper(_grouped)
    result: torch.Tensor = run(*local, experts.swiglu_limit, x, counts, num_shards)
    return result


def _grouped(
    weight1: torch.Tensor,
    bias1: torch.Tensor,
    weight2: torch.Tensor,
    bias2: torch.Tensor,
    limit: float,
    x: torch.Tensor,
    counts: torch.Tensor,
    num_shards: int,
) -> torch.Tensor:
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    expert_of = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True)
    h = torch._grouped_mm(x.bfloat16(), weight1.transpose(-2, -1).bfloat16(), offs=ends)
    h = swiglu(h + _of_rows(bias1, expert_of).to(h.dtype), limit=limit)
    h = torch._grouped_mm(h, weight2.transpose(-2, -1).bfloat16(), offs=ends)
    scaled = ScaleBiasForward.apply(bias2, num_shards)
    return h + _of_rows(scaled, expert_of).to(h.dtype)


def _of_rows(bias: torch.Tensor, expert_of: torch.Tensor) -> torch.Tensor:
    """Return the bias of each row's expert; zero for rows of none."""
    zeros = torch.zeros(1, bias.shape[1], dtype=bias.dtype, device=bias.device)
    return torch.cat([bias, zeros]).index_select(0, expert_of)
