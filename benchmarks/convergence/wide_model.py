"""A DeepSeek-V3 whose experts are wider than a block of 128 numbers; jobs import this module."""

from __future__ import annotations

from typing import Final

from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_integration.register  # noqa: F401  (registers the specs)
from torchtitan_integration.flavors import debug_deepseek_v3

FLAVOR: Final = "wide_cpu"

get_train_spec("deepseek_v3").model_args[FLAVOR] = debug_deepseek_v3(
    dim=256, inter_dim=512, moe_inter_dim=256
)
