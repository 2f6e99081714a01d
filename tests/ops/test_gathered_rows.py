"""Which rows a rank has, told by everyone's counts: as an all-to-all would bring them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.ops.gathered_rows import LOCAL_ROWS, SLICE_COUNTS


@st.composite
def routings(draw):
    """Draw (experts of every rank's rows sorted, ranks, local experts)."""
    ranks, local = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_rows = draw(st.integers(0, 8))
    expert = st.integers(0, ranks * local - 1)
    rows = st.lists(expert, min_size=num_rows, max_size=num_rows).map(sorted)
    return draw(st.lists(rows, min_size=ranks, max_size=ranks)), ranks, local


def counts_of(experts, num_experts):
    return torch.tensor([[row.count(e) for e in range(num_experts)] for row in experts])


@given(routing=routings())
@settings(deadline=None)
def test_rows_come_by_sender_then_expert(routing):
    experts, ranks, local = routing
    counts, per_rank = counts_of(experts, ranks * local), len(experts[0])
    for rank in range(ranks):
        mine = range(rank * local, (rank + 1) * local)
        expected = [
            sender * per_rank + place
            for sender, row in enumerate(experts)
            for place, e in enumerate(row)
            if e in mine
        ]
        source = LOCAL_ROWS(counts, rank * local, local, len(expected), per_rank)
        assert source.tolist() == expected


@given(seed=st.integers(0, 999), tokens=st.integers(1, 4), slices=st.integers(1, 3))
@settings(deadline=None)
def test_slices_count_the_rows_of_their_own_tokens(seed, tokens, slices):
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens * slices, 5, generator=generator).topk(2).indices
    order = chosen.reshape(-1).argsort(stable=True)
    by_slice = (order // 2 // tokens).argsort(stable=True)
    found = SLICE_COUNTS(torch.bincount(chosen.reshape(-1), minlength=5), by_slice, slices)
    expected = [torch.bincount(part.reshape(-1), minlength=5) for part in chosen.split(tokens)]
    assert torch.equal(found, torch.stack(expected))
