"""Flavors that train in seconds; a job names this module as `experimental.custom_import`."""

from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_integration.register  # noqa: F401  (registers the specs)
from torchtitan_integration.register import debug_model_args


def moe(**changes):
    sizes = {
        "num_experts": 8,
        "num_shared_experts": 1,
        "top_k": 2,
        "score_func": "sigmoid",
        "score_before_experts": False,
    }
    return MoEArgs(**{**sizes, **changes})


TINY = {"dim": 64, "inter_dim": 64, "moe_inter_dim": 32}
FLAVORS = get_train_spec("deepseek_v3").model_args
FLAVORS["tiny"] = debug_model_args(**TINY, moe_args=moe())
# torch finds a pipeline stage's shapes by running it on uninitialised memory, and the router counts
# these tokens too: with load balancing, no two pipeline runs of torchtitan are alike
FLAVORS["tiny_pipeline"] = debug_model_args(
    **TINY, n_layers=6, moe_args=moe(load_balance_coeff=None)
)
