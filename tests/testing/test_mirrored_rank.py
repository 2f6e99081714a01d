"""What mirrored ranks send is what the ranks that they stand for would send."""

import pytest
import torch

from moe_compile.ops.hop_rows import hop_table
from moe_compile.testing.mirrored_rank import MirroredGroup, TableLayout

RANKS = range(4)


def seen_from(rank, chosen, num_experts):
    """Return the experts that rank `rank` chooses where rank 0 chooses `chosen`."""
    return ((chosen // num_experts) ^ rank) * num_experts + chosen % num_experts


@pytest.mark.parametrize("num_slices", [1, 2, 3])
@pytest.mark.parametrize("edges", [[0, 2], [0, 1, 3], [0, 1, 2, 4]])
def test_the_table_of_two_hops_is_that_of_the_ranks_mirrored(edges, num_slices):
    num_experts, own = edges[-1], torch.Generator().manual_seed(num_slices)
    scores = torch.rand(7, 4 * num_experts, generator=own)
    chosen = scores.topk(3).indices
    tables = []
    for rank in RANKS:
        of_rank = seen_from(rank, chosen, num_experts)
        counts = torch.bincount(of_rank.flatten(), minlength=4 * num_experts)
        tables.append(hop_table(of_rank, counts, 2, 2, edges, num_slices)[0])
    layout = TableLayout(num_experts=num_experts, num_slices=num_slices)
    swapped = layout.swapped(tables[0])
    assert all(torch.equal(swapped[rank], tables[rank][0]) for rank in RANKS)
    if num_slices == 1 and len(edges) <= num_experts:  # asked in slices, and sent whole
        layout = TableLayout(num_experts=num_experts, num_slices=2)
        assert torch.equal(layout.swapped(tables[0]), swapped)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_experts", [1, 3])
def test_gathered_counts_are_those_of_all_ranks(num_ranks, num_experts):
    group, number = MirroredGroup(num_ranks), num_ranks * num_experts
    chosen = torch.arange(number).repeat_interleave(torch.arange(number))
    of_ranks = [seen_from(rank, chosen, num_experts) for rank in range(num_ranks)]
    counts = [torch.bincount(one, minlength=number) for one in of_ranks]
    gathered = torch.empty(num_ranks * number, dtype=torch.int64)
    group._allgather_base(gathered, counts[0], None)
    assert torch.equal(gathered, torch.cat(counts))
    listed = [torch.empty_like(one) for one in counts]
    group.allgather([listed], [counts[0]], None)
    assert all(map(torch.equal, listed, counts))


def test_what_is_one_on_a_rank_is_that_on_each():
    gathered = torch.empty(4)
    MirroredGroup(4)._allgather_base(gathered, torch.tensor([5.0]), None)
    assert gathered.tolist() == [5.0] * 4
