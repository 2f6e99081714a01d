"""Whether a chunk of experts rounds as the whole region does: its operators, pair by pair.

Contract
    Chunk and whole run the same operators, forward and backward. A chunk is taken to have the
    bits of the whole only where every one of them is known to round alike in both: it works on
    tensors of the same form, or takes experts one by one.
    On CUDA an operator is taken to compute every element by the same code.

On a CPU, in a scan of some 300,000 products of torch 2.13 (four and eight bytes: up to 256 rows,
128 features; two bytes: up to 128 and 256; 2 to 8 matrices whole, 1 to 4 in a part), a part had
the bits of the whole in every case where rows fill multiples of 64 bytes, in two bytes columns
too, on one thread; on several, in four and two bytes alone, a part of two matrices at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from moe_compile.proof.operator_call import Call
from moe_compile.testing.cpu_rounding.position_rounding import (
    ALIGNED_BYTES,
    LIE_APART,
    ROUNDED_RIGHT,
    block_of,
    on_cuda,
    rounds_by_position,
)

PRODUCTS: Final = frozenset({"bmm", "baddbmm"})
ROW_BY_ROW: Final = frozenset(
    {
        "sum", "native_layer_norm", "_fused_rms_norm", "native_layer_norm_backward",
        "_fused_rms_norm_backward",
    }
)  # fmt: skip
"""Operators that sum within an expert, by the same loops for each where experts are outermost."""

NUM_MATRICES: Final = 2
"""Of a batch whose matrices are dealt out to threads; a single one is split."""


def first_difference(whole: Sequence[Call], part: Sequence[Call]) -> str:
    """Return what may round otherwise in a part, "" where nothing does."""
    rounding = {call.name for call in whole if call.is_pointwise and _rounds(call, whole)}
    pairs = zip(whole, part, strict=True)
    return next(filter(None, (_difference(a, b, a.name in rounding) for a, b in pairs)), "")


def _rounds(call: Call, calls: Sequence[Call]) -> bool:
    """Whether an elementwise operator rounds by position: one of a backward, as its forward does.

    What is known of operators is known of their gradients too.
    """
    name = call.name.removesuffix("_backward")
    if name == call.name:
        return rounds_by_position(call)
    forward = next((other for other in calls if other.name == name), None)
    return rounds_by_position(forward) if forward is not None else name not in ROUNDED_RIGHT


def _difference(whole: Call, part: Call, rounds: bool) -> str:
    pairs = list(_pairs(whole, part))
    out = whole.outputs[0]
    if on_cuda(out) or not any(t.dtype.is_floating_point or t.is_complex() for t, _ in pairs):
        return ""
    if all(a.shape == b.shape for a, b in pairs):
        same = all(_lie_alike(a, b) for a, b in pairs)
        if same or (whole.is_pointwise and not rounds):
            return ""
        return f"{whole.name} in {out.dtype}: what it reads lies otherwise in memory"
    if any(len(_differing(a, b)) > 1 for a, b in pairs):
        return f"{whole.name} in {out.dtype}: the experts are in several dimensions"
    if whole.is_pointwise:
        return _pointwise(whole, pairs) if rounds else ""
    if whole.name in PRODUCTS:
        return _product(whole, pairs)
    if whole.name in ROW_BY_ROW:
        return _by_rows(whole, pairs)
    return f"{whole.name} in {out.dtype}: not known to round by expert"


Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _pairs(whole: Call, part: Call) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from zip(whole.inputs, part.inputs, strict=True)
    yield from zip(whole.outputs, part.outputs, strict=True)


def _differing(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """Return the dimensions in which two tensors differ in size."""
    return [d for d, sizes in enumerate(zip(a.shape, b.shape, strict=True)) if sizes[0] != sizes[1]]


def _lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    steps = [_steps(t) for t in (a, b)]
    offset = (a.storage_offset() - b.storage_offset()) * a.element_size()
    return steps[0] == steps[1] and offset % ALIGNED_BYTES == 0


def _steps(tensor: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions that are walked along."""
    return [s for size, s in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _pointwise(call: Call, pairs: Pairs) -> str:
    block, out = block_of(call), call.outputs[0]
    lies_apart = call.name.removesuffix("_backward") in LIE_APART
    for tensors in pairs:
        for dim in _differing(*tensors):
            if not lies_apart and not all(map(_is_dense, tensors)):
                return f"{call.name} in {out.dtype}: experts that are parts of longer rows"
            if any(not _is_dense(t) or t.stride(dim) % block for t in tensors):
                return (
                    f"{call.name} in {out.dtype}: experts of shape {list(out.shape)} that do not "
                    f"fill blocks of {block}"
                )
    return ""


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie without gaps, in whatever order."""
    extent = 1
    walked = zip(tensor.shape, tensor.stride(), strict=True)
    for stride, size in sorted((stride, size) for size, stride in walked if size != 1):
        if stride != extent:
            return False
        extent *= size
    return True


def _product(call: Call, pairs: Pairs) -> str:
    """Check a batch of products: see the module docstring."""
    out = call.outputs[0]
    said = f"{call.name} in {out.dtype}"
    if any(_differing(a, b) not in ([], [0]) for a, b in pairs):
        return f"{said}: the experts are not its batch"
    size, threads = out.element_size(), torch.get_num_threads()
    added = call.inputs[0] if call.name == "baddbmm" else None
    for whole, part in pairs:
        steps = [s for t in (whole, part) for s in (*_steps(t), t.storage_offset()) if s != 1]
        sizes = [int(n) for n in whole.shape[1:]] if size <= 2 and whole is not added else []
        rows = [n * size % ALIGNED_BYTES for n in (*steps, *sizes)]
        if any(rows) or whole.stride()[1:] != part.stride()[1:] or 1 not in whole.stride():
            return f"{said}: matrices of shape {list(whole.shape[1:])}, no multiples of 64 bytes"
    if threads > 1 and (size > 4 or pairs[-1][1].shape[0] < NUM_MATRICES):
        return f"{said}: a part of the experts is dealt out otherwise to {threads} threads"
    return ""


def _by_rows(call: Call, pairs: Pairs) -> str:
    out = call.outputs[0]
    for whole, part in pairs:
        for dim in _differing(whole, part):
            if any(t.stride(dim) != max(t.stride()) or not _is_dense(t) for t in (whole, part)):
                return f"{call.name} in {out.dtype}: the experts are not outermost"
    if torch.get_num_threads() > 1:
        return f"{call.name} in {out.dtype}: threads may share it otherwise"
    return ""
