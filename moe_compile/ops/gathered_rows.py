"""Indices of this rank's rows among all ranks' routed rows, when every rank knows every count.

Contract
    All ranks' rows are numbered by sender, `rows_per_rank` each, sorted by expert within one:
    number `sender * rows_per_rank + place`. A rank's rows stand in the order in which an all-to-all
    would bring them: by sender, then by expert, then in the sender's order.

Worked example: two ranks of two experts, counts [[1, 0, 2, 1], [0, 3, 1, 0]], four rows each.
Rank 1 has experts 2 and 3: rows 1, 2, 3 of sender 0 and row 3 of sender 1, numbers [1, 2, 3, 7].
"""

from __future__ import annotations

import torch

from moe_compile.ops.permute import LIBRARY

LIBRARY.define(
    "local_rows(Tensor counts, int first, int num_local, SymInt num_rows, SymInt rows_per_rank)"
    " -> Tensor"
)
LIBRARY.define("slice_counts(Tensor counts, Tensor by_slice, int num_slices) -> Tensor")


def local_rows(
    counts: torch.Tensor, first: int, num_local: int, num_rows: int, rows_per_rank: int
) -> torch.Tensor:
    """Return the numbers of a rank's rows, `[num_rows]`.

    `counts` `[ranks, experts]` integers; the rank has the experts from `first` on. `num_rows` must
    be the sum of their counts.
    """
    ahead = counts[:, :first].sum(1)
    runs = counts[:, first : first + num_local].sum(1)
    ends = torch.cumsum(runs, 0)
    places = torch.arange(num_rows, device=counts.device)
    sender = torch.searchsorted(ends, places, right=True).clamp(max=counts.shape[0] - 1)
    return sender * rows_per_rank + ahead[sender] - (ends - runs)[sender] + places


def slice_counts(counts: torch.Tensor, by_slice: torch.Tensor, num_slices: int) -> torch.Tensor:
    """Return the number of rows of each slice for each expert, `[num_slices, experts]`.

    `counts` `[experts]` are those of all rows, sorted by expert; `by_slice` is a stable order of
    the rows by slice, `[rows]`, every slice with as many as any other.
    """
    rows = torch.arange(by_slice.shape[0], device=counts.device)
    expert = torch.searchsorted(torch.cumsum(counts, 0), rows, right=True)
    of_slices = expert[by_slice].view(num_slices, -1)
    labels = torch.arange(counts.shape[0] + 1, device=counts.device).expand(num_slices, -1)
    return torch.searchsorted(of_slices, labels.contiguous()).diff(dim=1)


LIBRARY.impl("local_rows", local_rows, "CompositeImplicitAutograd")
LIBRARY.impl("slice_counts", slice_counts, "CompositeImplicitAutograd")
LOCAL_ROWS = torch.ops.megamoe.local_rows.default
SLICE_COUNTS = torch.ops.megamoe.slice_counts.default
