"""Sum gradients over ranks with each contribution rounded once, to bfloat16, and the sum float32.

Contract
    Rounding is to nearest, ties to even; a value beyond bfloat16's largest becomes infinite.
    The sum is float32 whatever the number of ranks: no partial sum is ever rounded to bfloat16.
    Rounding takes no memory but `STAGED` bfloat16 values: a float32 buffer of N values becomes N
    bfloat16 values in its lower half, and its upper half is free for the N that are received
    (MegaScale-MoE, section 5).

Worked example, N = 8, STAGED = 1; each line reads float32 values and writes half as many bytes,
which lie where values stood that earlier lines have read:

    values [0, 1) to staging, then bytes [0, 2)
    values [1, 2) = bytes [4, 8)    to bytes [2, 4)
    values [2, 4) = bytes [8, 16)   to bytes [4, 8)
    values [4, 8) = bytes [16, 32)  to bytes [8, 16)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

STAGED: Final = 1 << 16
"""Values rounded through memory of their own (128 KiB), so that few kernels round the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Halves:
    """The two halves of a float32 buffer of N values, as bfloat16 `[N]` each."""

    rounded: torch.Tensor
    """The rounded values of the buffer."""
    free: torch.Tensor
    """Unused memory."""


def round_in_place(buffer: torch.Tensor, *, staged: int = STAGED) -> Halves:
    """Round the float32 `buffer` `[N]`, contiguous, within its own memory; its values are lost."""
    length = buffer.numel()
    both = buffer.view(torch.bfloat16)
    halves = Halves(rounded=both[:length], free=both[length:])
    start = min(max(staged, 1), length)
    halves.rounded[:start].copy_(buffer[:start].to(torch.bfloat16))
    while start < length:
        end = min(2 * start, length)
        halves.rounded[start:end].copy_(buffer[start:end])
        start = end
    return halves


def sum_contributions(received: torch.Tensor, output: torch.Tensor, scale: float = 1.0) -> None:
    """Write `scale` times the sum of every rank's bfloat16 `[K]` in `received` to `output` `[K]`.

    `received` holds the ranks' contributions one after another.
    """
    by_rank = received.view(-1, output.numel())
    width = output.numel()
    if output.device.type == "cpu":  # torch copies what it sums to float32 there: a part at a time
        width = -(-width // by_rank.size(0))
    for part, total in zip(by_rank.split(width, dim=1), output.split(width), strict=True):
        torch.sum(part, dim=0, dtype=torch.float32, out=total)
    if scale != 1.0:
        output.mul_(scale)
