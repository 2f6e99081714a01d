"""Section `slices`: grouped products of some experts' rows against those of all, bit for bit.

Contract
    Chunks of torchtitan's layer multiply the rows of their own experts by slices of the weights.
    Forward and both gradients must have the bits that one product over all experts has, whatever
    the groups' sizes. That holds on a CPU; which kernel a GPU runs may depend on the number of
    groups, so it is checked there.
    Groups are padded to a multiple of `ALIGNMENT` rows with rows of zeros, as torchtitan pads them;
    an expert without tokens has that many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from benchmarks.gpu.empty_groups import check_empty_groups
from benchmarks.gpu.sizes import Sizes
from moe_compile.check.sections import Record, say

ALIGNMENT: Final = 8
"""Rows that torchtitan pads groups of bfloat16 rows to a multiple of."""
CHUNKS: Final = (2, 4)


def check_slices(record: Record, sizes: Sizes) -> None:
    """Run the section."""
    case = sizes.case
    generator = torch.Generator().manual_seed(0)
    for name, counts in _routings(case.tokens * case.top_k, case.experts).items():
        for width, hidden in ((case.width, case.hidden), (case.hidden, case.width)):
            shape = (width, hidden)
            what = f"{name}, {width} x {hidden}"
            record.attempt(
                what, lambda n=name, c=counts, s=shape: _check(record, sizes, generator, n, c, s)
            )
    check_empty_groups(record, sizes)


def padded(counts: Sequence[int]) -> list[int]:
    """Return the rows of each group with its padding."""
    return [max(ALIGNMENT, -(-count // ALIGNMENT) * ALIGNMENT) for count in counts]


def _routings(rows: int, experts: int) -> dict[str, list[int]]:
    """Return rows of each expert: even, uneven, and all at one of them."""
    even, total = rows // experts, experts * (experts + 1) // 2
    return {
        "even": [even] * experts,
        "uneven": [rows * (expert + 1) // total for expert in range(experts)],
        "one expert": [rows] + [0] * (experts - 1),
    }


def _check(
    record: Record,
    sizes: Sizes,
    generator: torch.Generator,
    name: str,
    counts: Sequence[int],
    shape: tuple[int, int],
) -> None:
    width, hidden = shape
    experts, groups = len(counts), padded(counts)
    rows_RW = torch.zeros(sum(groups), width, dtype=torch.bfloat16)
    starts = [sum(groups[:expert]) for expert in range(experts + 1)]
    for start, count in zip(starts, counts, strict=False):
        drawn = torch.randn(count, width, generator=generator)
        rows_RW[start : start + count] = drawn.bfloat16()
    weights_EWH = torch.randn(experts, width, hidden, generator=generator).bfloat16()
    grad_RH = torch.randn(sum(groups), hidden, generator=generator).bfloat16()
    tensors = [t.to(sizes.device) for t in (rows_RW, weights_EWH, grad_RH)]
    whole = _products(*tensors, starts, range(experts))
    for num_chunks in (n for n in CHUNKS if experts % n == 0):
        parts = [_products(*tensors, starts, chunk) for chunk in _chunks(experts, num_chunks)]
        joined = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
        row = {"routing": name, "shape": f"{width} x {hidden}", "chunks": num_chunks}
        for what, ours, wanted in zip(("rows", "input", "weight"), joined, whole, strict=True):
            row[what] = wrong = int((ours != wanted).sum())
            record.expect(
                wrong == 0,
                f"{name}, {width} x {hidden}, {num_chunks} chunks: {what}",
                f"{wrong} of {wanted.numel()} elements differ from the product of all experts",
            )
        record.add_row(row)
    say(f"slices: {name}, {width} x {hidden}")


def _chunks(experts: int, num_chunks: int) -> Iterator[range]:
    each = experts // num_chunks
    return (range(first, first + each) for first in range(0, experts, each))


def _products(
    rows_RW: torch.Tensor,
    weights_EWH: torch.Tensor,
    grad_RH: torch.Tensor,
    starts: Sequence[int],
    experts: range,
) -> tuple[torch.Tensor, ...]:
    """Return the product of the experts' rows, and its gradients of rows and weights."""
    first, end = starts[experts.start], starts[experts.stop]
    ends = [starts[expert + 1] - first for expert in experts]
    offs = torch.tensor(ends, dtype=torch.int32, device=rows_RW.device)
    rows = rows_RW[first:end].detach().requires_grad_()
    weights = weights_EWH[experts.start : experts.stop].detach().requires_grad_()
    out = torch._grouped_mm(rows, weights, offs=offs)
    out.backward(grad_RH[first:end])
    assert rows.grad is not None and weights.grad is not None
    return out.detach(), rows.grad, weights.grad
