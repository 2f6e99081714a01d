"""Programs drawn of operators that keep the batch apart and of ones that mix it.

Where the proof says that a program may run in parts of its batch, a change of one sequence changes
nothing of others.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moe_compile.batch.batch_proof import split_around
from moe_compile.dims.factors import Factor, Lost, flat, regroup, unify
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.query import has_gradient
from moe_compile.journal.reasons import Left
from tests.capture import dynamo_graphs

SIZES = (4, 8, 16)
"""Sequences, positions, width; the first is a divisor of the others, which mixes them up easily."""
TABLE = torch.arange(64.0).double().reshape(4, 16) / 64
MIXER = torch.arange(16.0).double().reshape(4, 4) / 16


def masked(x, dim, index):
    """Return `x` without what a mask hides, into which it is written in place."""
    mask = torch.ones_like(x, dtype=torch.bool)
    mask.scatter_(dim, index, False)
    return x.masked_fill(mask, 0.0)


def last_tokens(x):
    """Return of each sequence the token that its own length says, and write one beside it."""
    length, mine = (x[..., 0] > 0).sum(1).clamp(min=1), torch.arange(len(x))
    found = torch.zeros_like(x)
    found[mine, length - 1] = x[mine, length - 1]
    return x + found + x[mine, -1][:, None] + x[mine[:, None], x[..., 0].topk(2, 1)[1]][:, :1]


def written_in_place(x):
    """Write masks by slices, and add to memory of the graph's own."""
    mask = torch.zeros(len(x), 1, 8, 8).double()
    mask[:, :, :, :6] = mask[:, :, :, :6].masked_fill((x.sum(-1) > 0)[:, None, None, :6], -5.0)
    y = x.clone()
    y[:, 1:].copy_(x[:, :-1])
    y[y > 2] = 0.0
    y.mul_(0.5).add_(1)
    y += x
    return F.scaled_dot_product_attention(*3 * (y[:, None],), attn_mask=mask)[:, 0]


def copied_to_the_next(x):
    y = x.clone()
    y[1:].copy_(x[:-1])
    return y


def convolved(x):
    """Convolve and pad along the sequence, and pool."""
    turned, weight = x.transpose(1, 2), TABLE[:1].reshape(1, 1, 16)[:, :, :3].expand(16, 1, 3)
    y = F.conv1d(F.pad(turned, (2, 0)), weight, groups=16)
    return (y + F.avg_pool1d(turned, 3, 1, 1)).transpose(1, 2)


def normalized(x):
    """Apply norms that are no norms of features alone."""
    turned = x.transpose(1, 2)
    y = F.group_norm(turned, 4) + F.instance_norm(turned) + F.batch_norm(turned, *TABLE[:2])
    return y.transpose(1, 2) + F.normalize(x, dim=-1)


APART = {
    "elementwise": lambda x: torch.where(torch.isnan(x), 0, torch.lerp(x, x.erf(), 0.5)).round(),
    "activations": lambda x: F.elu(x) + F.mish(x) + F.logsigmoid(x) + F.hardswish(x) + x.clip(-1),
    "reductions": lambda x: (
        x * x.max(-1, keepdim=True).values / x.norm(dim=(1, 2), keepdim=True)
        - x.logsumexp(1, True) * x.argmax(-1, True)
        + x.var(1, keepdim=True)
    ),
    "turned along": lambda x: x.flip(1) + x.roll(1, 1) + x.cummax(1)[0] + F.glu(x.repeat(1, 1, 2)),
    "expanded as": lambda x: x * x.sum(1, keepdim=True).expand_as(x) + TABLE[0].expand_as(x),
    "last tokens": last_tokens,
    "written in place": written_in_place,
    "convolved": convolved,
    "other norms": normalized,
    "scattered": lambda x: x.scatter_add(2, x.topk(4, -1)[1], torch.ones_like(x[..., :4])),
    "positions in another order": lambda x: x[:, torch.arange(7, -1, -1)],
    "norm": lambda x: F.rms_norm(x, (16,)),
    "softmax over features": lambda x: torch.softmax(x, -1),
    "softmax over positions": lambda x: torch.softmax(x, 1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention of heads": lambda x: (
        F.scaled_dot_product_attention(*3 * (x.reshape(4, 8, 4, 4).transpose(1, 2),))
        .transpose(1, 2)
        .reshape(4, 8, 16)
    ),
    "attention with fewer KV heads": lambda x: (
        F.scaled_dot_product_attention(
            x.reshape(4, 8, 4, 4).transpose(1, 2),
            *2 * (x.reshape(4, 8, 4, 4)[:, :, :2].transpose(1, 2),),
            enable_gqa=True,
        )
        .transpose(1, 2)
        .reshape(4, 8, 16)
    ),
    "features turned": lambda x: x.reshape(4, 8, 4, 4).transpose(2, 3).reshape(4, 8, 16),
    "positions by features": lambda x: x.transpose(1, 2).reshape(4, 16, 8).transpose(1, 2),
    "batch last and back": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "rows": lambda x: x.flatten(0, 1).mul(2).unflatten(0, (4, 8)),
    "positions summed": lambda x: x + x.sum(1, keepdim=True),
    "gate": lambda x: torch.where(x > 0, x, x * 0.1),
    "halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "stacked": lambda x: torch.stack([x, x * 2], 2).mean(2),
    "weights by sequence": lambda x: x * TABLE[:, None],
    "largest": lambda x: x.gather(-1, torch.topk(x, 16, -1)[1]),
    "products": lambda x: x @ x.transpose(1, 2) @ x,
    "einsum": lambda x: torch.einsum("bsd,btd->bst", x, x) @ x,
    "mask of chosen": lambda x: masked(x, 2, torch.topk(x, 4, -1)[1]),
    "running sum": lambda x: torch.cumsum(x, 1),
    "sorted features": lambda x: torch.sort(x, -1)[0],
    "looked up": lambda x: x + TABLE[(x.sum(-1) > 0).long()],
}
MIXED = {
    "batch norm in training": lambda x: F.batch_norm(x, None, None, training=True),
    "sequences written in place": lambda x: x.clone().cumsum_(0),
    "copied to the next": copied_to_the_next,
    "norm of all": lambda x: x / x.norm(),
    "padded by a sequence": lambda x: F.pad(x, (0, 0, 0, 0, 1, 0))[:-1],
    "a place in another order": lambda x: x + x[torch.arange(4).flip(0), 0][:, None],
    "batch norm": lambda x: x - x.mean(0),
    "mask of a sequence": lambda x: masked(x, 0, (x[:1] > 0).long()),
    "running sum of sequences": lambda x: torch.cumsum(x, 0),
    "first sequence": lambda x: x + x[0],
    "first sequences": lambda x: x + x[:1],
    "softmax over sequences": lambda x: torch.softmax(x, 0),
    "attention over sequences": lambda x: F.scaled_dot_product_attention(
        *3 * (x.transpose(0, 1),)
    ).transpose(0, 1),
    "products of sequences": lambda x: (MIXER @ x.flatten(1)).view(4, 8, 16),
    "einsum over sequences": lambda x: torch.einsum("bsd,bc->csd", x, MIXER),
    "sorted sequences": lambda x: torch.sort(x, 0)[0],
    "rolled": lambda x: torch.roll(x, 1, 0),
    "turned round": lambda x: x.flip(0),
    "other half": lambda x: torch.cat(x.chunk(2, 0)[::-1], 0),
    "a sequence from each": lambda x: x[torch.tensor([1, 0, 3, 2])],
    "largest of all": lambda x: x / x.amax((0, 1, 2), keepdim=True),
}
TURNED = {
    "batch second": lambda x: x.transpose(0, 1).reshape(4, 8, 16),
    "batch inside": lambda x: x.reshape(8, 4, 16).transpose(0, 1).reshape(4, 8, 16),
}
"""Sequences stay apart, in another place."""
STEPS = APART | MIXED | TURNED


def test_dimensions_that_change_places_become_one():
    """[S, B] meets [B, S], both of two indices: each was named after the other, for ever."""
    s, b = Factor(2), Factor(2)
    unify([s, b], [b, s])
    (first, second), other = flat([s, b]), flat([b, s])
    assert first is second and other == [first, second]


def test_a_factor_that_stands_twice_is_cut_once():
    twice = Factor(4)
    dims = regroup([twice, twice], [2, 2, 2, 2])
    outer, inner = flat([twice])
    assert [flat(dim) for dim in dims] == [[outer], [inner]] * 2


class Steps(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names = names

    def forward(self, x):
        for name in self.names:
            x = STEPS[name](x)
        return x


def proven(program, x):
    """Return how `program` runs on two parts of `x`, None where it is refused."""
    (gm,) = dynamo_graphs(program, x.clone().requires_grad_())
    try:
        return split_around(GraphFacts(gm.graph), [], 2)
    except (Left, Lost):
        return None


def by_part(split, node, tensor):
    """Return a view of `tensor`, the value of `node`, with the index of the batch first."""
    factors = [factor for dim in split.tracker.dims(node) for factor in flat(dim)]
    opened = tensor.contiguous().view([factor.size for factor in factors])
    return opened.movedim(factors.index(split.batch), 0)


@pytest.mark.parametrize("name", APART | TURNED)
def test_what_keeps_sequences_apart_is_proven(name):
    assert proven(Steps([name]), torch.randn(SIZES).double()) is not None


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_sequences_is_not_split_by_them(name):
    """Positions may come apart then."""
    split = proven(Steps([name, "attention"]), torch.randn(SIZES).double())
    assert split is None


@pytest.mark.slow
@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=6),
    seed=st.integers(0, 1 << 30),
)
def test_what_is_proven_of_drawn_steps_is_so(names, seed):
    """A change of one index of what is taken for the batch changes nothing of others."""
    program = Steps(names)
    x = torch.randn(SIZES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    split = proven(program, x)
    if split is None:
        return
    (given,) = (node for node in split.cut if has_gradient(node))
    (result,) = split.results
    whole = by_part(split, result, program(x))
    for i in range(split.size):
        changed = x.clone()
        by_part(split, given, changed)[i] += 1
        others = torch.arange(split.size) != i
        assert torch.equal(by_part(split, result, program(changed))[others], whole[others])
