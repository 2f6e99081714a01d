"""Functions that AOTAutograd's cache may take into its keys by their name.

Fault
    The cache keeps a program from Dynamo's graph to the compiled code of forward and backward. It
    refuses a graph with a function that it does not know, which may depend on more than its
    arguments. It does not know some functions of torch that depend on their arguments alone: those
    of `torch.nn.attention.sdpa_kernel` (torch/_functorch/_aot_autograd/autograd_cache.py,
    check_node_safe).
Seen in
    torch 2.13.
Noticed by
    `test_a_choice_of_attention_kernels_is_refused_by_the_cache` in test_still_there.py.
Contract
    A function is marked by Inductor's own setting for it, with a version that is part of the key.
    A user's own marks stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch._inductor.config as inductor_config

OF_TORCH: Final = (
    "torch.nn.attention._backend_from_string",
    "torch.nn.attention._sdpa_kernel",
)
"""`torch.nn.attention.sdpa_kernel`, as Dynamo writes it."""

SETTING: Final = "unsafe_marked_cacheable_functions"


def cacheable_functions(patches: Mapping[str, Any]) -> dict[str, object]:
    """Return the setting with `OF_TORCH` and the user's marks.

    `patches` are the settings of one compilation, which win over those for all. {} where this
    torch has no such setting.
    """
    known = inductor_config.get_config_copy()
    if SETTING not in known:
        return {}
    return {
        SETTING: {
            **dict.fromkeys(OF_TORCH, torch.__version__),
            **patches.get(SETTING, known[SETTING]),
        }
    }
