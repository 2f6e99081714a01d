"""Marks of tensors: equal for equal bits, and a norm that tells by how much they differ.

Contract
    A mark is made where the tensor lies; two numbers leave the device. Tensors with other bits have
    other marks but for one chance in 2 ** 64; NaN equals NaN of the same bits.
    Distances are norms of differences over the norm of the reference, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

PIECE: Final = 2**22
"""Elements marked at a time: what is made of them takes eight bytes each."""
ODD: Final = -0x61C8864680B583EB
"""Factor of positions: 2 ** 64 over the golden ratio, as a signed number."""
SAME_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """What is kept of a tensor's values."""

    bits: int
    norm: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first tensor of two runs that has other bits."""

    name: str
    written: float
    """Its norm, as written."""
    found: float
    num_others: int
    """Tensors after it that have other bits too."""


def mark_of(tensor: torch.Tensor) -> Mark:
    """Return the mark of a plain tensor of any type and device."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    numbers = flat.view(SAME_SIZE[flat.element_size()])
    bits, square = torch.zeros((), dtype=torch.int64, device=flat.device), 0.0
    for begin in range(0, flat.numel(), PIECE):
        piece = numbers[begin : begin + PIECE].to(torch.int64)
        place = torch.arange(begin, begin + piece.numel(), device=flat.device)
        bits = bits * ODD + _mixed(_mixed(place) + piece).sum()
        square += float(flat[begin : begin + PIECE].double().square().sum())
    return Mark(bits=int(bits), norm=math.sqrt(square))


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Return numbers in which every bit depends on those of `x` (the finish of splitmix64)."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)


def first_difference(written: Mapping[str, Mark], found: Mapping[str, Mark]) -> Difference | None:
    """Return the first tensor with other bits, in the order of `written`; None where all agree.

    A tensor that only one of them has is a difference.
    """
    names = [*written, *(name for name in found if name not in written)]
    other = [
        n
        for n in names
        if n not in written or written[n].bits != getattr(found.get(n), "bits", None)
    ]
    if not other:
        return None
    norms = [run[other[0]].norm if other[0] in run else math.nan for run in (written, found)]
    return Difference(name=other[0], written=norms[0], found=norms[1], num_others=len(other) - 1)


def squares(value: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Return the square of the norm of the difference, and of the reference's."""
    ours, theirs = value.detach().reshape(-1), reference.detach().reshape(-1)
    off = whole = 0.0
    for begin in range(0, theirs.numel(), PIECE):
        a = ours[begin : begin + PIECE].double()
        b = theirs[begin : begin + PIECE].to(a.device).double()
        off += float((a - b).square().sum())
        whole += float(b.square().sum())
    return off, whole


def distance(pairs: Iterable[tuple[float, float]]) -> float:
    """Return a distance from squares, of the parts of one tensor or of several; inf for NaN."""
    off, whole = map(sum, zip(*pairs, strict=True))
    if math.isnan(off):
        return math.inf
    if whole == 0.0:
        return 0.0 if off == 0.0 else math.inf
    return math.sqrt(off / whole)
