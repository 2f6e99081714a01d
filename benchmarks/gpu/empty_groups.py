"""Section `slices` too: grouped products of groups without rows, in memory that held NaN before.

Contract
    A group without rows has a weight gradient of zeros, also where no group has a row, as in a
    chunk that no token went to. Rows behind the last offset are nobody's: whatever they hold, and
    whatever the memory of results held, other rows and all weight gradients have the bits that
    they have without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from benchmarks.gpu.sizes import Sizes
from moe_compile.check.sections import Record, say
from moe_compile.testing.programs.every_rewrite import poison

BEHIND: Final = 16
"""Rows behind the last offset."""
ROWS: Final = 24
"""Of a group that has some."""
GROUPS: Final = {"some empty": (ROWS, 0, 2 * ROWS, 0), "all empty": (0, 0, 0, 0)}


def check_empty_groups(record: Record, sizes: Sizes) -> None:
    """Run these checks."""
    for name, counts in GROUPS.items():
        record.attempt(name, lambda n=name, c=counts: _check(record, sizes, n, c))


def _check(record: Record, sizes: Sizes, name: str, counts: Sequence[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    width, hidden, rows = sizes.case.width, sizes.case.hidden, sum(counts)
    drawn = (torch.randn(rows, n, generator=generator).bfloat16() for n in (width, hidden))
    rows_RW, grad_RH = (tensor.to(sizes.device) for tensor in drawn)
    weights = torch.randn(len(counts), width, hidden, generator=generator).bfloat16()
    weights = weights.to(sizes.device)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).to(sizes.device)
    alone = products(rows_RW, weights, grad_RH, ends)
    poison(sizes.device)
    behind = products(_with_rows_behind(rows_RW), weights, _with_rows_behind(grad_RH), ends)
    row = {"routing": name, "shape": f"{width} x {hidden}", "chunks": "-"}
    for what, found, wanted in zip(("rows", "input", "weight"), behind, alone, strict=True):
        row[what] = wrong = int((found[: len(wanted)] != wanted).sum())
        why = f"{wrong} of {wanted.numel()} elements differ from those without rows behind"
        record.expect(wrong == 0, f"{name}, rows behind the last offset: {what}", why)
    empty = [group for group, count in enumerate(counts) if count == 0]
    unwritten = int((alone[2][empty] != 0).sum() + (behind[2][empty] != 0).sum())
    why = f"{unwritten} elements of weight gradients are not zero"
    record.expect(unwritten == 0, f"{name}, groups without rows", why)
    record.add_row(row)
    say(f"slices: {name}")


def products(
    rows_RW: torch.Tensor, weights: torch.Tensor, grad_RH: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the product of rows by their group's weights, and gradients of rows and weights."""
    rows, of_weights = rows_RW.detach().requires_grad_(), weights.detach().requires_grad_()
    out = torch._grouped_mm(rows, of_weights, offs=ends)
    out.backward(grad_RH)
    assert rows.grad is not None and of_weights.grad is not None
    return out.detach(), rows.grad, of_weights.grad


def _with_rows_behind(rows: torch.Tensor) -> torch.Tensor:
    """Return `rows` with NaN behind them."""
    return torch.cat([rows, rows.new_full((BEHIND, rows.shape[1]), torch.nan)])
