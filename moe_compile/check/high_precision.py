"""Run PyTorch code in float64, casts of its own included: a reference for roundings.

Contract
    Every function of torch gets floating tensors as float64, complex ones as complex128, and so are
    what it casts to and what it makes. Grouped products are made expert by expert. In-place writes
    keep the type of what they write to. The result has the type that the code as written has, of
    its first argument; gradients reach parameters through the casts, rounded once. Of what is
    between, nothing is kept for the backward pass: it is computed again, as activation
    checkpointing does, and what the code writes into buffers may then be written twice.
    Discrete choices, as those of experts, may fall otherwise than at lower precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

IN_PLACE: Final = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
CASTS: Final = ("float", "bfloat16", "half")
GROUPED: Final = "_grouped_mm"


def in_high_precision(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` computed in float64; results have the type of the first argument."""

    def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with _HighPrecision():
            result = forward(_up(first), *args, **kwargs)
        return tree_map(lambda x: _as(first.dtype, x), result)

    return functools.partial(checkpoint, run, use_reentrant=False)


def _as(dtype: torch.dtype, value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_number else value


def _up(value: Any) -> Any:
    """Return a tensor or a type in high precision, and anything else as it is."""
    if isinstance(value, torch.dtype):
        if value.is_complex:
            return torch.complex128
        return torch.float64 if value.is_floating_point else value
    if not isinstance(value, torch.Tensor):
        return value
    high = _up(value.dtype)
    return value if value.dtype is high else value.to(high)


class _HighPrecision(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        if name in CASTS:
            return _up(args[0])
        is_in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        kept = args[:1] if is_in_place else ()
        given = (*kept, *tree_map(_up, args[len(kept) :]))
        if name == GROUPED:
            return _grouped(*given, **tree_map(_up, kwargs))
        return func(*given, **tree_map(_up, kwargs))


def _grouped(
    x: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor, **settings: Any
) -> torch.Tensor:
    """Return rows `[N, D]` of each group times its matrix of `[E, D, F]`; zeros behind the last."""
    del settings
    ends = offs.tolist()
    parts = [
        x[begin:end] @ weight
        for begin, end, weight in zip([0, *ends[:-1]], ends, weights, strict=True)
    ]
    rest = x.new_zeros(x.shape[0] - ends[-1], weights.shape[-1])
    return torch.cat([*parts, rest])
