"""Tell every rank what all ranks route where: counts, tokens of rows, factors of rows.

Contract
    One exchange of integers serves all slices; a factor costs one exchange more, with a gradient.
    A slice is an equal share of a rank's tokens in order, with all their rows.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D
from moe_compile.ops.gathered_rows import SLICE_COUNTS
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.token_regions import TokenRows
from passes.replay.sizes import Size, extent

ON_THE_WIRE: Final = torch.int32
"""Type of counts and token numbers on their way: a rank has fewer than 2**31 rows."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The routing of all ranks."""

    counts: tuple[fx.Node, ...]
    """Per slice `[ranks, experts]`."""
    tokens: tuple[fx.Node, ...]
    """Per slice `[ranks, rows of a rank]`: which of its slice's tokens a row is."""
    num_rows: Size
    """Rows that one rank has in one slice."""
    by_slice: fx.Node | None
    """Order of this rank's rows by slice; None for one slice."""


def emit_gather(emit: Emitter, region: MoERegion, tensor: fx.Node) -> fx.Node:
    """Launch the gather of all ranks' `tensor` along its first dimension."""
    whole = emit.method("contiguous", tensor)
    return emit.call(C10D.all_gather_into_tensor, whole, region.num_ranks, region.group)


def emit_routing(emit: Emitter, region: MoERegion, found: TokenRows, num_slices: int) -> Routing:
    """Emit the exchange of counts and of rows' tokens; what it needs stands before `emit`."""
    num_experts = region.num_ranks * region.num_local_experts
    counts = emit.method("to", emit.method("reshape", region.counts, -1), torch.int64)
    index, by_slice = found.index, None
    num_rows = extent(emit, index, 0)
    if num_slices > 1:
        num_tokens = extent(emit, found.tokens, 0)
        assert isinstance(num_rows, int) and isinstance(num_tokens, int)  # as the pass has checked
        num_rows, num_tokens = num_rows // num_slices, num_tokens // num_slices
        slice_of_row = emit.call(operator.floordiv, index, num_tokens)
        by_slice = emit.call(torch.argsort, slice_of_row, stable=True)
        counts = emit.method("reshape", emit.call(SLICE_COUNTS, counts, by_slice, num_slices), -1)
        index = emit.call(operator.getitem, index, by_slice)
        index = emit.call(operator.mod, index, num_tokens)
    parts = [emit.method("to", part, ON_THE_WIRE) for part in (counts, index)]
    launch = emit_gather(emit, region, emit.call(torch.cat, parts))
    table = emit.method("view", emit.call(C10D.wait_tensor, launch), region.num_ranks, -1)
    table = emit.method("to", table, torch.int64)
    behind = num_slices * num_experts
    columns = (
        emit.call(operator.getitem, table, (slice(None), part))
        for part in (slice(None, behind), slice(behind, None))
    )
    shapes = ((region.num_ranks, num_slices, width) for width in (num_experts, num_rows))
    counted, tokens = (emit.method("reshape", c, *s) for c, s in zip(columns, shapes, strict=True))
    return Routing(
        counts=_slices(emit, counted, num_slices),
        tokens=_slices(emit, tokens, num_slices),
        num_rows=num_rows,
        by_slice=by_slice,
    )


def _slices(emit: Emitter, everyone: fx.Node, num_slices: int) -> tuple[fx.Node, ...]:
    """Emit each slice of `[ranks, slices, ...]`."""
    every = slice(None)
    return tuple(emit.call(operator.getitem, everyone, (every, c)) for c in range(num_slices))


def emit_factor(
    emit: Emitter, region: MoERegion, routing: Routing, factor: fx.Node
) -> tuple[fx.Node, ...]:
    """Emit the gather of a factor per row `[R, 1]`; return each slice's, `[ranks * rows, 1]`."""
    if routing.by_slice is not None:
        factor = emit.call(operator.getitem, factor, routing.by_slice)
    everyone = emit.call(C10D.wait_tensor, emit_gather(emit, region, factor))
    num_slices = len(routing.counts)
    shape = (region.num_ranks, num_slices, routing.num_rows)
    slices = _slices(emit, emit.method("view", everyone, *shape), num_slices)
    return tuple(emit.method("reshape", part, -1, 1) for part in slices)
