"""Flavors that train in seconds; a job names this module as `experimental.custom_import`."""

from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_integration.register  # noqa: F401  (registers the specs)
from tests.integration.one_stream import read_one_stream
from torchtitan_integration.flavors import (
    debug_deepseek_v3,
    debug_gpt_oss,
    debug_llama4,
    debug_qwen3,
)


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
# torch finds a pipeline stage's shapes by running it on uninitialised memory, and the router counts
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
for name in TINY:
    read_one_stream(get_train_spec(name))
