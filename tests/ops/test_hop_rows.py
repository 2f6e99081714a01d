"""Indices of two hops: what they bring is what one all-to-all would, row for row."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.ops.hop_rows import back_rows, fan_rows, far_rows, hop_sizes, hop_table, near_rows


def exchange(sent, splits):
    """Return what each rank receives of rows that each splits among all."""
    parts = [torch.split(rows, sizes) for rows, sizes in zip(sent, splits, strict=True)]
    return [torch.cat([of_rank[to] for of_rank in parts]) for to in range(len(sent))]


def among(groups, sent, splits):
    """Exchange within each of `groups`, which hold all ranks."""
    got = [None] * len(sent)
    for group in groups:
        own = exchange([sent[r] for r in group], [splits[r] for r in group])
        for rank, rows in zip(group, own, strict=True):
            got[rank] = rows
    return got


@st.composite
def routings(draw):
    """Draw nodes, ranks of a node, experts of a rank, and what the tokens of each rank choose."""
    nodes, local = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    experts = draw(st.integers(1, 4)) if draw(st.booleans()) else 17  # more than a word of bits
    total = nodes * local * experts
    k = draw(st.integers(1, min(4, total)))
    own = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    bias = torch.rand(total, generator=own) * draw(st.sampled_from([0, 3]))
    chosen = [
        (torch.rand(draw(st.integers(0, 7)), total, generator=own) + bias).topk(k, sorted=False)[1]
        for _ in range(nodes * local)
    ]
    return nodes, local, experts, chosen


@given(routings())
def test_two_hops_bring_what_one_exchange_brings(drawn):
    nodes, local, experts, chosen = drawn
    ranks, per_node = range(nodes * local), local * experts
    cross = [range(place, nodes * local, local) for place in range(local)]
    on_node = [range(b * local, (b + 1) * local) for b in range(nodes)]
    x = [torch.arange(len(c)) + 1000 * rank for rank, c in enumerate(chosen)]
    counts = [torch.bincount(c.reshape(-1), minlength=len(ranks) * experts) for c in chosen]

    flat_sent = [
        x[r][torch.argsort(chosen[r].reshape(-1), stable=True) // chosen[r].shape[1]] for r in ranks
    ]
    flat = exchange(flat_sent, [c.view(len(ranks), -1).sum(1).tolist() for c in counts])

    told = [hop_table(c, n, nodes, local) for c, n in zip(chosen, counts, strict=True)]
    table = exchange([t for t, _ in told], [[1] * len(ranks)] * len(ranks))
    table = [t.view(nodes, local, -1).to(torch.int64) for t in table]
    sizes = [hop_sizes(table[r], told[r][1], r % local).tolist() for r in ranks]
    lengths = list(itertools.accumulate([0, nodes, nodes, local, local]))
    split = [[s[a:b] for a, b in itertools.pairwise(lengths)] for s in sizes]
    far_sent, far_got, near_sent, near_got = zip(*split, strict=True)

    first = [far_rows(chosen[r], nodes, per_node, sum(far_sent[r])) for r in ranks]
    there = among(cross, [x[r][first[r][0]] for r in ranks], far_sent)
    masks = among(cross, [mask for _, mask in first], far_sent)
    assert [len(rows) for rows in there] == [sum(got) for got in far_got]
    near = [near_rows(masks[r], per_node, sum(near_sent[r])) for r in ranks]
    rows = among(on_node, [there[r][near[r]] for r in ranks], near_sent)
    assert [len(part) for part in rows] == [sum(got) for got in near_got]
    for r in ranks:
        fan = fan_rows(table[r][:, :, :experts], len(rows[r]))
        assert torch.equal(rows[r][fan], flat[r])
        back = back_rows(table[r][:, :, :experts], len(rows[r]))
        assert torch.equal(flat[r][back], rows[r])


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_token_goes_to_a_node_once(nodes):
    chosen = torch.tensor([[0, 1, 3], [3, 2, 0]])
    far, masks = far_rows(chosen, nodes, 4 // nodes, 2 * nodes)
    assert far.tolist() == [0, 1] * nodes
    assert masks.tolist() == ([[0b1011], [0b1101]] if nodes == 1 else [[3], [1], [2], [3]])


def test_the_last_bit_of_a_word_is_a_bit():
    """It is the sign of an int32."""
    _, masks = far_rows(torch.tensor([[31, 5]]), 1, 32, 1)
    assert near_rows(masks, 32, 2).tolist() == [0, 0]
    assert masks.item() < 0
