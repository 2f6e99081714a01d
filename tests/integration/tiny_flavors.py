"""Flavors that train in seconds; a job names this module as `experimental.custom_import`."""

import dataclasses

from torchtitan.models.gpt_oss.model.model import GptOssModel
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_integration.register  # noqa: F401  (registers the specs)
from torchtitan_integration.flavors import (
    DebugGptOssArgs,
    debug_deepseek_v3,
    debug_gpt_oss,
    debug_llama4,
    debug_qwen3,
)
from torchtitan_integration.layout import BACKEND
from torchtitan_integration.losses import with_mean_gradients
from torchtitan_integration.parallelize import parallelize


def lay_out_by_us(spec):
    """Have our layout run without megamoe too, where a job names another backend for it.

    Not compiled at all, where the job does not compile.
    """
    lay_out, build_loss = spec.parallelize_fn, spec.build_loss_fn

    def layout(part, dims, job):
        return (lay_out if job.compile.backend == BACKEND else parallelize)(part, dims, job)

    def loss(job, *, parallel_dims):
        built = build_loss(job, parallel_dims=parallel_dims)
        is_ours = job.compile.backend != BACKEND
        return with_mean_gradients(built, parallel_dims, job) if is_ours else built

    spec.parallelize_fn, spec.build_loss_fn = layout, loss


class Float32GptOssArgs(DebugGptOssArgs):
    """Of a gpt_oss whose blocks are float32; torchtitan's are bfloat16 where FSDP casts none."""


class GptOss(GptOssModel):
    """torchtitan's, but for these."""

    def __init__(self, args):
        super().__init__(args)
        if isinstance(args, Float32GptOssArgs):
            self.layers.float()


def moe(**changes):
    sizes = {
        "num_experts": 8,
        "num_shared_experts": 1,
        "top_k": 2,
        "score_func": "sigmoid",
        "score_before_experts": False,
    }
    return MoEArgs(**{**sizes, **changes})


DEEPSEEK = {"dim": 64, "inter_dim": 64, "moe_inter_dim": 32}
QWEN = {"dim": 64, "hidden_dim": 64, "moe_inter_dim": 32}
TINY = {
    "deepseek_v3": debug_deepseek_v3(**DEEPSEEK, moe_args=moe(), n_layers=2),
    "qwen3": debug_qwen3(**QWEN, n_layers=2),
    "llama4": debug_llama4(dim=64),
    "gpt_oss": debug_gpt_oss(dim=64, moe_inter_dim=64, n_layers=2),
}
for name, flavor in TINY.items():
    get_train_spec(name).model_args["tiny"] = flavor
# torch finds a pipeline stage's shapes by running it on uninitialised memory, and torchtitan counts
# these tokens too: with load balancing, no two pipeline runs of torchtitan are alike
get_train_spec("deepseek_v3").model_args["tiny_pipeline"] = debug_deepseek_v3(
    **DEEPSEEK, n_layers=4, moe_args=moe(load_balance_coeff=None)
)
get_train_spec("qwen3").model_args["tiny_pipeline"] = debug_qwen3(
    **QWEN, n_layers=4, moe_args=moe(num_shared_experts=0, load_balance_coeff=None)
)
get_train_spec("deepseek_v3").model_args["tiny_wide_latent"] = debug_deepseek_v3(
    **DEEPSEEK, moe_args=moe(), kv_lora_rank=128
)
get_train_spec("deepseek_v3").model_args["tiny_flex"] = debug_deepseek_v3(
    **DEEPSEEK, moe_args=moe(), n_layers=2, attn_type="flex", attn_mask_type="block_causal"
)
# experts that multiply in float32: grouped GEMMs are bfloat16's; the half of one fills vectors too
WIDE = {"moe_inter_dim": 64}
FLOAT32 = {
    "deepseek_v3": debug_deepseek_v3(
        **DEEPSEEK | WIDE, moe_args=moe(use_grouped_mm=False), n_layers=2
    ),
    "qwen3": debug_qwen3(
        **QWEN | WIDE, n_layers=2, moe_args=moe(num_shared_experts=0, use_grouped_mm=False)
    ),
    "llama4": debug_llama4(
        dim=64, moe_args=moe(top_k=1, score_before_experts=True, use_grouped_mm=False)
    ),
    "gpt_oss": Float32GptOssArgs(
        **{
            **vars(TINY["gpt_oss"]),
            "moe_args": dataclasses.replace(TINY["gpt_oss"].moe_args, use_grouped_mm=False),
        }
    ),
}
get_train_spec("gpt_oss").model_cls = GptOss
for name, flavor in FLOAT32.items():
    get_train_spec(name).model_args["float32"] = flavor
get_train_spec("deepseek_v3").model_args["float32_pipeline"] = debug_deepseek_v3(
    **DEEPSEEK | WIDE, n_layers=4, moe_args=moe(use_grouped_mm=False)
)
get_train_spec("qwen3").model_args["float32_pipeline"] = debug_qwen3(
    **QWEN | WIDE,
    n_layers=4,
    moe_args=moe(num_shared_experts=0, use_grouped_mm=False),
)
for name in TINY:
    lay_out_by_us(get_train_spec(name))
