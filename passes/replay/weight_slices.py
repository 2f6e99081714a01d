"""Weights of grouped products in pieces, one for each chunk of experts."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import tensor_of
from moe_compile.regions.regions import MoERegion, RowProof
from passes.replay.replayed import Replay
from passes.replay.sizes import Size, times

OFFSET_BYTES: Final = 4
"""Of one offset of a grouped product, an int32."""
ALIGNED_BYTES: Final = 16
"""Where memory begins that Inductor hands to a product as it is; else it makes a copy for each."""


def split_weights(
    emit: Emitter, sliceable: Iterable[fx.Node], sizes: Sequence[Size]
) -> dict[fx.Node, list[fx.Node]]:
    """Emit the weight of each sliceable grouped GEMM in one piece per chunk, of so many experts.

    One split per GEMM: what the weight receives as its gradient from there is one concatenation,
    not a sum of padded pieces, and still a term of its own, added where the GEMM's was. It lies in
    memory as the weight does, as the GEMM's would: a weight given transposed is split as it lies.
    """
    pieces: dict[fx.Node, list[fx.Node]] = {}
    for gemm in sliceable:
        weight, tensor = gemm.args[1], tensor_of(gemm.args[1])
        assert tensor is not None
        crossed = not tensor.is_contiguous()
        along = emit.method("transpose", weight, -2, -1) if crossed else weight
        parts = emit.call(torch.split, along, [*sizes])
        each = [emit.call(operator.getitem, parts, c) for c in range(len(sizes))]
        pieces[gemm] = [emit.method("transpose", p, -2, -1) for p in each] if crossed else each
    return pieces


def slice_to_chunk(
    emit: Emitter,
    region: MoERegion,
    proof: RowProof,
    weights: Mapping[fx.Node, fx.Node],
    replay: Replay,
) -> None:
    """Give each grouped GEMM of one chunk the weights and offsets of the chunk's experts only."""
    for gemm, weight in weights.items():
        padding = proof.padding.get(gemm, (0,) * region.num_local_experts)
        _slice(emit, gemm, weight, padding, replay)


def slice_by_load(
    emit: Emitter,
    proof: RowProof,
    weights: Mapping[fx.Node, fx.Node],
    sizes: Sequence[Size],
    chunk: int,
    replay: Replay,
) -> None:
    """Give each grouped GEMM of `chunk` the weights and offsets of its experts, so many as read.

    Groups of other experts have as many rows each, of `proof.padding`, and are left out as below.
    """
    for gemm, weight in weights.items():
        whole, offsets = gemm.args[1], gemm.kwargs["offs"]
        assert isinstance(whole, fx.Node) and isinstance(offsets, fx.Node)
        ends, unit = replay.env[offsets], max(proof.padding.get(gemm, ()), default=0)
        before = _padded(emit, sizes[:chunk], unit)
        behind = _padded(emit, sizes[chunk + 1 :], unit)
        if before:
            ends = emit.call(operator.sub, ends, before)
        sliced = emit.call(operator.getitem, emit.call(torch.split, ends, [*sizes]), chunk)
        replay.pruned.inputs[gemm] = {offsets: sliced, whole: weight}
        if before or behind:
            replay.pruned.without_rows[gemm] = (before, behind)


def _padded(emit: Emitter, sizes: Sequence[Size], unit: int) -> Size:
    """Return the rows without an expert's in so many groups."""
    return times(emit, emit.call(torch.sym_sum, [*sizes]), unit) if unit and sizes else 0


def _slice(
    emit: Emitter, gemm: fx.Node, weight: fx.Node, padding: Sequence[int], replay: Replay
) -> None:
    """Give a grouped GEMM of one chunk the weights and offsets of the chunk's experts only.

    Groups of other experts may have some rows each, of `padding`: of these it is given none. Were
    they added to groups of the chunk, the gradient of a weight would be a product over more rows,
    which a CPU rounds otherwise where they come first.
    """
    whole, offsets = gemm.args[1], gemm.kwargs["offs"]
    assert isinstance(whole, fx.Node) and isinstance(offsets, fx.Node)
    start, stop = replay.experts.start, replay.experts.stop
    before, behind = sum(padding[:start]), sum(padding[stop:])
    ends = replay.env[offsets]
    if before:  # taken off all, in the kernel that computes them: slicing them is no kernel
        ends = emit.call(operator.sub, ends, before)
    if start * OFFSET_BYTES % ALIGNED_BYTES:  # Inductor writes out what is read by strides, once
        rolled = emit.call(torch.roll, ends, -start)
        sliced = emit.call(torch.as_strided, rolled, (stop - start,), (1,))
    else:
        sliced = emit.call(operator.getitem, ends, slice(start, stop))
    replay.pruned.inputs[gemm] = {offsets: sliced, whole: weight}
    if before or behind:
        replay.pruned.without_rows[gemm] = (before, behind)
