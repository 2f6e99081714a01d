"""Rows in buffers with room for so many of every rank, found by counts that stay on the device.

Contract
    A buffer has `room` slots for each rank, one rank after another: the first ones hold its rows,
    the others padding. Rows over the room have no slot, and padding has no row: their index is -1.
    `move_rows` reads no row that no index names, and the gradient of no place that has none.

Worked example: a rank sends 2 and 3 rows to two ranks, with room for 2. Slots of its rows are
[0, 1, 2, 3, -1]; rows of the slots are [0, 1, 2, 3]. With room for 3 they are [0, 1, 3, 4, 5] and
[0, 1, -1, 2, 3, 4].
"""

from __future__ import annotations

from typing import Any

import torch

from moe_compile.ops.permute import LIBRARY

LIBRARY.define("move_rows(Tensor rows, Tensor source, Tensor target) -> Tensor")
LIBRARY.define("room_index(Tensor counts, int room, int num_rows) -> (Tensor, Tensor)")
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


def room_index(counts: torch.Tensor, room: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slot of each row, `[num_rows]`, and the row of each slot, `[ranks * room]`.

    `counts` `[ranks]` are the rows of each rank, which lie one rank after another.
    """
    ends = torch.cumsum(counts, 0)
    starts, kept = ends - counts, counts.clamp(max=room)
    rows = torch.arange(num_rows, device=counts.device)
    rank = torch.searchsorted(ends, rows, right=True).clamp(max=counts.shape[0] - 1)
    within = rows - starts[rank]
    slots = torch.where(within < kept[rank], rank * room + within, -1)
    place = torch.arange(room, device=counts.device)
    return slots, torch.where(place < kept[:, None], starts[:, None] + place, -1).reshape(-1)


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
