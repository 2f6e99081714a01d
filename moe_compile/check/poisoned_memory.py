"""Have memory that is given next hold NaN, as far as torch's caching allocator gives it again."""

from __future__ import annotations

from typing import Final

import torch

from moe_compile.testing.joining import rank_device

BLOCK_BYTES: Final = (2**12, 2**16, 2**20, 2**24)
"""Sizes of blocks that held NaN."""
BLOCKS: Final = 4
"""Of each size."""


def poison(device: str | torch.device | None = None) -> None:
    """Poison memory of a device, by default of this rank's."""
    place = rank_device() if device is None else torch.device(device)
    held = [
        torch.full((size // 2,), torch.nan, device=place, dtype=torch.bfloat16)
        for size in BLOCK_BYTES
        for _ in range(BLOCKS)
    ]
    del held
