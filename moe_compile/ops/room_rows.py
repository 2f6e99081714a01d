"""Rows in buffers with room for so many of every rank, found by counts that stay on the device.

Contract
    A buffer has `room` slots for each rank, one rank after another: the first ones hold its rows,
    the others padding. Rows over the room have no slot, and padding has no row: their index is -1.
    Rows may be divided into chunks, each with a buffer of its own; buffers lie one behind another.
    `move_rows` reads no row that no index names, and the gradient of no place that has none.

Worked example: a rank sends 2 and 3 rows to two ranks, with room for 2. Slots of its rows are
[0, 1, 2, 3, -1]; rows of the slots are [0, 1, 2, 3]. With room for 3 they are [0, 1, 3, 4, 5] and
[0, 1, -1, 2, 3, 4]. In two chunks, of 1 and 1, and of 1 and 2 rows, with room for 2, slots are
[0, 4, 2, 6, 7] and rows are [0, -1, 2, -1, 1, -1, 3, 4].
"""

from __future__ import annotations

from typing import Any

import torch

from moe_compile.ops.permute import LIBRARY

LIBRARY.define("move_rows(Tensor rows, Tensor source, Tensor target) -> Tensor")
LIBRARY.define("room_index(Tensor runs, int room, int num_rows) -> (Tensor, Tensor)")
LIBRARY.define("counts_within(Tensor counts, int room) -> Tensor")


class _MoveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, source: Any, target: Any) -> Any:
        ctx.save_for_backward(source, target)
        named = (source >= 0).view(-1, *[1] * (rows.dim() - 1))
        return torch.where(named, rows.index_select(0, source.clamp(min=0)), rows.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        source, target = ctx.saved_tensors
        return torch.ops.megamoe.move_rows(grads[0], target, source), None, None


def move_rows(rows: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> Any:
    """Return `rows[source]`, with zeros where `source` is -1; the gradient is moved by `target`.

    Shapes: rows `[R, ...]`; source `[M]`, numbers of rows; target `[R]`, the place among the M of
    each row, -1 where it has none. R and M are at least 1.
    """
    return _MoveRows.apply(rows, source, target)


def room_index(runs: torch.Tensor, room: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slot of each row, `[num_rows]`, and the row of each slot.

    `runs` `[ranks, experts, chunks]` are the lengths of the runs that the rows lie in, in this
    order. There are `chunks * ranks * room` slots, those of a chunk for a rank side by side.
    """
    num_ranks, num_experts, num_chunks = runs.shape
    within = (torch.cumsum(runs, 1) - runs).reshape(-1)
    ends = torch.cumsum(runs.reshape(-1), 0)
    starts = ends - runs.reshape(-1)
    rows = torch.arange(num_rows, device=runs.device)
    run = torch.searchsorted(ends, rows, right=True).clamp(max=ends.shape[0] - 1)
    place = within[run] + rows - starts[run]
    part = run % num_chunks * num_ranks + run // (num_experts * num_chunks)
    slots = torch.where((place < room) & (rows < ends[-1]), part * room + place, -1)
    by_part = runs.permute(2, 0, 1).reshape(-1, num_experts)
    return slots, _rows_of_slots(by_part, starts.view_as(runs), room, num_rows)


def _rows_of_slots(
    counts: torch.Tensor, starts: torch.Tensor, room: int, num_rows: int
) -> torch.Tensor:
    """Return the row of each slot; `counts` `[parts, experts]` are of each chunk and rank."""
    num_parts, num_experts = counts.shape
    ends = torch.cumsum(counts, 1)
    shifts = starts.permute(2, 0, 1).reshape(-1, num_experts) - ends + counts
    place = torch.arange(room, device=counts.device).expand(num_parts, room).contiguous()
    found = torch.searchsorted(ends, place, right=True).clamp(max=num_experts - 1)
    rows = place + shifts.gather(1, found)
    is_row = (place < ends[:, -1:]) & (rows < num_rows)
    return torch.where(is_row, rows, -1).reshape(-1)


def counts_within(counts: torch.Tensor, room: int) -> torch.Tensor:
    """Return the part of `counts` `[ranks, experts]` whose rows have room, in order of experts."""
    ends = torch.cumsum(counts, 1).clamp(max=room)
    return torch.diff(ends, dim=1, prepend=torch.zeros_like(ends[:, :1]))


LIBRARY.impl("move_rows", move_rows, "CompositeImplicitAutograd")
LIBRARY.impl("room_index", room_index, "CompositeImplicitAutograd")
LIBRARY.impl("counts_within", counts_within, "CompositeImplicitAutograd")
MOVE_ROWS = torch.ops.megamoe.move_rows.default
ROOM_INDEX = torch.ops.megamoe.room_index.default
COUNTS_WITHIN = torch.ops.megamoe.counts_within.default
