"""All cases, in the order of the table."""

from __future__ import annotations

from typing import Final

from benchmarks.acceptance.packages import (
    deepspeed_auto_ep,
    deepspeed_layers,
    fairscale_layer,
    lucidrains_layers,
    megatron_layers,
    repository_layer,
    torchao_layers,
    transformers_dense,
    transformers_moe,
)
from benchmarks.acceptance.subject import Case

CASES: Final = (
    *fairscale_layer.CASES,
    *deepspeed_layers.CASES,
    *deepspeed_auto_ep.CASES,
    *megatron_layers.CASES,
    *torchao_layers.CASES,
    *transformers_moe.CASES,
    *lucidrains_layers.CASES,
    *transformers_dense.CASES,
    *repository_layer.CASES,
)


def find_case(name: str) -> Case:
    """Return the case of that name."""
    return next(case for case in CASES if case.name == name)
