"""Train specs the tests compare with; a job names this module as `experimental.custom_import`.

`stock_deepseek_v3` is torchtitan's own layout. `placed_deepseek_v3` is ours, and prints where
parameters lie and which modules FSDP gathers. `tiny` is a flavor that trains in seconds.
"""

import dataclasses

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.deepseek_v3.infra.parallelize import parallelize_deepseekv3
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import register_train_spec

from torchtitan_integration.parallelize import parallelize
from torchtitan_integration.register import debug_model_args, make_spec

TINY = {
    "dim": 64,
    "inter_dim": 64,
    "moe_inter_dim": 32,
    "moe_args": MoEArgs(
        num_experts=4,
        num_shared_experts=1,
        top_k=2,
        score_func="sigmoid",
        score_before_experts=False,
    ),
}


def stock(model, dims, job):
    model = parallelize_deepseekv3(model, dims, job)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo cannot scale while it reduces
            module.set_force_sum_reduction_for_comms(True)
    return model


def placed(model, dims, job):
    model = parallelize(model, dims, job)
    if dist.get_rank() == 0:
        for name, p in model.named_parameters():
            mesh = ",".join(p.device_mesh.mesh_dim_names)
            print(f"PLACED {name} {mesh} {p.placements} {tuple(p.to_local().shape)}", flush=True)
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                print(f"GATHERED {name or 'root'}", flush=True)
    return model


for name, function in (("stock", stock), ("placed", placed)):
    spec = make_spec("deepseek_v3", function)
    flavors = {**spec.model_args, "tiny": debug_model_args(**TINY)}
    register_train_spec(f"{name}_deepseek_v3", dataclasses.replace(spec, model_args=flavors))
