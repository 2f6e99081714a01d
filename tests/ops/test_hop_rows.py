"""Indices of two hops: what they bring is what one all-to-all would, row for row."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.ops.hop_rows import (
    back_rows,
    chunk_rows,
    fan_rows,
    far_rows,
    hop_sizes,
    hop_table,
    near_rows,
)
from moe_compile.ops.two_hops import grouped


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
    """Draw nodes, ranks of a node, chunks of a rank's experts, slices, and what tokens choose."""
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
    edges = [0, *sorted(draw(st.sets(st.integers(1, experts), max_size=3)) | {experts})]
    return nodes, local, edges, draw(st.integers(1, 3)), chosen


def flat_rows(x, chosen, ranks, experts):
    """Return what one all-to-all brings, and how many rows of each sender and expert."""
    counts = [torch.bincount(c.reshape(-1), minlength=len(ranks) * experts) for c in chosen]
    sent = [
        x[r][torch.argsort(chosen[r].reshape(-1), stable=True) // chosen[r].shape[1]] for r in ranks
    ]
    return exchange(sent, [c.view(len(ranks), -1).sum(1).tolist() for c in counts]), counts


def brought(drawn, x, far_sent, far_got, near_sent, near_got):
    """Return what hop 2 brings each rank of each chunk."""
    nodes, local, edges, slices, chosen = drawn
    ranks, per_node, chunks = range(nodes * local), local * edges[-1], range(len(edges) - 1)
    cross = [range(place, nodes * local, local) for place in range(local)]
    on_node = [range(b * local, (b + 1) * local) for b in range(nodes)]
    num_far = [sum(map(sum, far_sent[r])) for r in ranks]
    first = [far_rows(chosen[r], nodes, per_node, slices, num_far[r]) for r in ranks]
    came = [[[] for _ in chunks] for _ in ranks]
    for s in range(slices):
        sent = [far_sent[r][s] for r in ranks]
        parts = [[sum(of_slice) for of_slice in far_sent[r]] for r in ranks]
        there, masks = (
            among(cross, [torch.split(v, parts[r])[s] for r, v in enumerate(both)], sent)
            for both in ([x[r][first[r][0]] for r in ranks], [masks for _, masks, _ in first])
        )
        assert [len(rows) for rows in there] == [sum(far_got[r][s]) for r in ranks]
        num_near = [sum(map(sum, near_sent[r][s])) for r in ranks]
        near = [near_rows(masks[r], per_node, edges, num_near[r]) for r in ranks]
        for c in chunks:
            pieces = [
                torch.split(there[r][near[r][0]], [*map(sum, near_sent[r][s])])[c] for r in ranks
            ]
            rows = among(on_node, pieces, [near_sent[r][s][c] for r in ranks])
            for r in ranks:
                assert len(rows[r]) == sum(near_got[r][s][c])
                came[r][c].append(rows[r])
    return [[torch.cat(rows) for rows in of_rank] for of_rank in came]


def check_chunks(received, edges, flat, came):
    """Check the rows of one rank by chunk: `fan` of them are its flat rows of these experts."""
    order, inverse = chunk_rows(received, edges, len(flat))
    assert torch.equal(flat[order][inverse], flat)
    of_chunks = []
    for (a, b), rows in zip(itertools.pairwise(edges), came, strict=True):
        of_chunks.append(rows[fan_rows(received[..., a:b], len(rows))])
        back = back_rows(received[..., a:b], len(rows))
        assert torch.equal(of_chunks[-1][back], rows)
    assert torch.equal(torch.cat(of_chunks), flat[order])
    of_expert = received.sum(2).reshape(-1, edges[-1])
    labels = torch.arange(edges[-1]).repeat(len(of_expert)).repeat_interleave(of_expert.reshape(-1))
    for (a, b), rows in zip(itertools.pairwise(edges), of_chunks, strict=True):
        assert torch.equal(rows, flat[(a <= labels) & (labels < b)])


@given(routings())
def test_two_hops_bring_what_one_exchange_brings(drawn):
    """Of each chunk of experts the rows of all slices, and by chunk they are all rows."""
    nodes, local, edges, slices, chosen = drawn
    experts, chunks = edges[-1], [*itertools.pairwise(edges)]
    ranks = range(nodes * local)
    x = [torch.arange(len(c)) + 1000 * rank for rank, c in enumerate(chosen)]
    flat, counts = flat_rows(x, chosen, ranks, experts)

    told = [
        hop_table(c, n, nodes, local, edges, slices) for c, n in zip(chosen, counts, strict=True)
    ]
    table = exchange([t for t, _ in told], [[1] * len(ranks)] * len(ranks))
    table = [t.view(nodes, local, slices, -1).to(torch.int64) for t in table]
    lengths = (slices * nodes,) * 2 + (slices * len(chunks) * local,) * 2
    lengths = [*itertools.accumulate(lengths, initial=0)]
    sizes = [hop_sizes(table[r], told[r][1], edges, r % local).tolist() for r in ranks]
    assert {*map(len, sizes)} == {lengths[-1]}
    split = [[s[a:b] for a, b in itertools.pairwise(lengths)] for s in sizes]
    far_sent, far_got = ([grouped(of[i], slices) for of in split] for i in (0, 1))
    near_sent, near_got = ([grouped(of[i], slices, len(chunks)) for of in split] for i in (2, 3))

    way = (far_sent, far_got, near_sent, near_got)
    came = brought(drawn, x, *way)
    for r in ranks:
        check_chunks(table[r][..., :experts], edges, flat[r], came[r])


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_token_goes_to_a_node_once(nodes):
    chosen = torch.tensor([[0, 1, 3], [3, 2, 0]])
    far, masks, slots = far_rows(chosen, nodes, 4 // nodes, 1, 2 * nodes)
    assert far.tolist() == [0, 1] * nodes
    assert slots.tolist() == ([0, 0] if nodes == 1 else [0, 0, 1, 1])
    assert masks.tolist() == ([[0b1011], [0b1101]] if nodes == 1 else [[3], [1], [2], [3]])


def test_the_last_bit_of_a_word_is_a_bit():
    """It is the sign of an int32."""
    _, masks, _ = far_rows(torch.tensor([[31, 5]]), 1, 32, 1, 1)
    near, slots = near_rows(masks, 32, [0, 32], 2)
    assert near.tolist() == [0, 0] and slots.tolist() == [0, 1]
    assert masks.item() < 0
