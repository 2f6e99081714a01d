"""DeepSpeed's AutoEP: the layer that takes the place of a transformers model's MoE layer.

What finds the layers and what takes their place is AutoEP's; the layer is compiled alone, because
deepspeed 0.19.8 does not put it into a model of transformers 5.24.0: the list of what a model
records, which it then changes, is another class (`_CanRecordRegistry.get() takes 2 positional
arguments but 3 were given`).

On CPUs it reads every count on the host to sort rows by expert, with a branch on each; on GPUs a
kernel does so. "Indices by operators" has torch's operators in its place.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from benchmarks.acceptance.packages.transformers_moe import SIZES, small_model
from benchmarks.acceptance.subject import Call, Case, Subject
from torchtitan_integration.cpu_launcher import generate_permute_indices


def _layer(rank: int, model: str, by_operators: bool) -> Subject:
    import deepspeed
    import deepspeed.ops
    from deepspeed.moe import ep_kernels

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # g++ would build it now
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    if by_operators:
        ep_kernels.generate_permute_indices = generate_permute_indices
    layer = _in_place_of(small_model(model, "grouped_mm", torch.bfloat16), rank)
    torch.manual_seed(100 + rank)
    rows = [torch.randn(2, n, SIZES["hidden_size"], dtype=torch.bfloat16) for n in (12, 20)]
    return Subject(model=layer, calls=[Call(args=(x,)) for x in rows])


def _in_place_of(model: nn.Module, rank: int) -> nn.Module:
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    config = parse_autoep_config({"enabled": True, "autoep_size": 2})
    (spec,) = AutoEP(model, config).ep_parser()
    layer = AutoEPMoELayer(spec, model.get_submodule(spec.moe_module_name), 2, rank, config)
    layer.set_deepspeed_parallelism()
    return layer.train()


CASES = tuple(
    Case(
        name=f"DeepSpeed AutoEP, {model}{title}",
        package="deepspeed",
        build=functools.partial(_layer, model=model, by_operators=bool(title)),
        num_ranks=2,
    )
    for title, models in {
        "": ["Mixtral"],
        ", indices by operators": ["Mixtral", "Qwen3-MoE", "DeepSeek-V3"],
    }.items()
    for model in models
)
