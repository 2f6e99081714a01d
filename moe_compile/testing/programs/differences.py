"""The differences between two runs of the same steps.

Contract
    Tensors are equal by `torch.equal`, NaNs in the same places among them, or within a bound of the
    norm of their difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

Named = dict[str, Any]
"""Results of one step by name."""


def all_differences(expected: list[Named], actual: list[Named], bound: float) -> list[str]:
    """Return the differences of the steps that both ran; `bound` is a relative error."""
    steps = enumerate(zip(expected, actual, strict=False))
    return [f"step {i}: {d}" for i, (a, b) in steps for d in _of_step(a, b, bound)]


def _of_step(theirs: Named, ours: Named, bound: float) -> Iterator[str]:
    for name in dict.fromkeys([*theirs, *ours]):
        if said := _difference(theirs.get(name), ours.get(name), bound):
            yield f"{name} {said}"


def _difference(theirs: Any, ours: Any, bound: float) -> str:
    if not (isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor)):
        return "" if theirs is ours or theirs == ours else f"is {ours}, eagerly {theirs}"
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return f"is {ours.dtype} {[*ours.shape]}, eagerly {theirs.dtype} {[*theirs.shape]}"
    if torch.equal(theirs, ours):
        return ""
    a, b = theirs.double().nan_to_num(123.0), ours.double().nan_to_num(123.0)
    if torch.equal(a, b):
        return ""
    error, size = (a - b).norm().item(), a.norm().item()
    if theirs.is_floating_point() and error <= bound * size:
        return ""
    return f"differs by {error:.3g}, of {size:.3g}"
