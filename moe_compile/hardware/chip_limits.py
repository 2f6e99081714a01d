"""Operations that torch and Triton lack, or do wrongly, on some of NVIDIA's GPUs; imports torch.

Contract
    Asked of the device of a graph's tensors while it is compiled; nothing runs on the device.
    A processor, and a GPU that is not on this machine, have none of these limits.
"""

from __future__ import annotations

from typing import Final

import torch

LEAST_FOR_E4M3: Final = (8, 9)
"""Compute capability from which Triton compiles conversions to float8 e4m3."""
GROUPED_GENERATIONS: Final = (9, 10)
"""Major compute capabilities for which torch 2.13 has a kernel of grouped products."""
EMPTY_GROUPS_UNWRITTEN: Final = (10,)
"""Major compute capabilities on which `_grouped_mm` may leave stale memory in the weight gradient
of a group without rows (pytorch#172439, open)."""


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU on this machine; None for any other device."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def packs_rows(device: torch.device) -> bool:
    """Whether rows can be packed into messages of eight bits on `device`."""
    found = capability_of(device)
    return found is None or found >= LEAST_FOR_E4M3


def multiplies_in_eight_bits(device: torch.device, least: tuple[int, int]) -> bool:
    """Whether tensor cores of `device` multiply numbers of eight bits, as from `least` on."""
    found = capability_of(device)
    return found is None or found >= least


def waits_in_products(device: torch.device) -> bool:
    """Whether `_grouped_mm` copies its offsets to the host and runs one product per group."""
    found = capability_of(device)
    return found is not None and found[0] not in GROUPED_GENERATIONS


def leaves_empty_groups(device: torch.device) -> bool:
    """Whether `_grouped_mm` of rows by rows may leave a group without rows unwritten."""
    found = capability_of(device)
    return found is not None and found[0] in EMPTY_GROUPS_UNWRITTEN
