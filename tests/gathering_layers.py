"""Layers whose model gathers tokens itself, and what gathers and reduces for other reasons.

Every rank gathers all tokens, its experts pick theirs, results are put back among all tokens, and a
reduce-scatter adds them up.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)

from tests.layers import GroupedExperts


class Gathering(nn.Module):
    """Each expert takes those of all tokens that score it best, so many at most."""

    def __init__(self, width, hidden, local, group):
        super().__init__()
        self.group, self.local, self.room = group, local, 16
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        shared = torch.Generator().manual_seed(0)
        own = torch.Generator().manual_seed(1 + self.rank)
        self.router = nn.Parameter(torch.randn(width, local * self.num_ranks, generator=shared))
        self.w1 = nn.Parameter(torch.randn(local, width, hidden, generator=own))
        self.w2 = nn.Parameter(torch.randn(local, hidden, width, generator=own))

    def forward(self, x):
        everyone = all_gather_tensor_autograd(x, 0, self.group)
        scores = torch.softmax(everyone @ self.router, -1)
        mine = scores[:, self.rank * self.local : (self.rank + 1) * self.local]
        return reduce_scatter_tensor_autograd(self.total(everyone, mine), "sum", 0, self.group)

    def expert(self, rows, e):
        return F.silu(rows @ self.w1[e]) @ self.w2[e]

    def total(self, everyone, scores):
        total = torch.zeros_like(everyone)
        for e in range(self.local):
            factors, rows = torch.topk(scores[:, e], self.room)
            out = self.expert(everyone[rows], e) * factors[:, None]
            total = total.index_add(0, rows, out)
        return total


class InPlace(Gathering):
    """Rows are taken by index_select, results written into zeros by an operator in place."""

    def total(self, everyone, scores):
        total = torch.zeros_like(everyone)
        for e in range(self.local):
            factors, rows = torch.topk(scores[:, e], self.room)
            out = self.expert(torch.index_select(everyone, 0, rows), e) * factors[:, None]
            total.index_add_(0, rows, out)
        return total


class Sorted(Gathering):
    """Rows in the order of their best expert; gathers of elements there and back."""

    def total(self, everyone, scores):
        order = torch.argsort(scores.argmax(-1), stable=True)[:, None].expand(-1, everyone.shape[1])
        rows = torch.gather(everyone, 0, order)
        out = torch.cat([self.expert(r, e) for e, r in enumerate(rows.chunk(self.local))])
        return torch.zeros_like(everyone).scatter_add(0, order, out)


class Assigned(Gathering):
    """Results are assigned to their places."""

    def total(self, everyone, scores):
        total = torch.zeros_like(everyone)
        for e in range(self.local):
            rows = (scores[:, e] > 0.5).long().argsort(stable=True)[: self.room]
            total[rows] = total[rows] + self.expert(everyone[rows], e)
        return total


class RoutedBefore(Gathering):
    """Every rank routes its own tokens; what was chosen is gathered beside them."""

    def forward(self, x):
        chosen = torch.argmax(x @ self.router, -1)
        everyone = all_gather_tensor_autograd(x, 0, self.group)
        labels = all_gather_tensor_autograd(chosen, 0, self.group)
        rows = (labels == self.rank).long().argsort(stable=True)[: self.room]
        total = torch.zeros_like(everyone).index_copy(0, rows, self.expert(everyone[rows], 0))
        return reduce_scatter_tensor_autograd(total, "sum", 0, self.group)


class GatheredByFunction(torch.autograd.Function):
    """Megatron-Core's: gathered forward, the gradient reduced and scattered."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.num_ranks = group, dist.get_world_size(group)
        return gathered(x, group, ctx.num_ranks)

    @staticmethod
    def backward(ctx, gradient):
        return scattered(gradient, ctx.group, ctx.num_ranks), None


class ScatteredByFunction(torch.autograd.Function):
    """The same the other way round."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.num_ranks = group, dist.get_world_size(group)
        return scattered(x, group, ctx.num_ranks)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, ctx.group, ctx.num_ranks), None


def gathered(x, group, num_ranks):
    out = x.new_empty(num_ranks * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def scattered(x, group, num_ranks):
    out = x.new_empty(x.shape[0] // num_ranks, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class ByFunctions(Gathering):
    """Both collectives in Functions of the model."""

    def forward(self, x):
        everyone = GatheredByFunction.apply(x, self.group)
        scores = torch.softmax(everyone @ self.router, -1)
        mine = scores[:, self.rank * self.local : (self.rank + 1) * self.local]
        return ScatteredByFunction.apply(self.total(everyone, mine), self.group)


STYLES = (Gathering, InPlace, Sorted, Assigned, RoutedBefore, ByFunctions)


class SequenceParallel(Gathering):
    """A dense layer sharded by its hidden dimension: no row moves."""

    def total(self, everyone, scores):
        return self.expert(everyone, 0)


class ZigZag(Gathering):
    """Positions are dealt out in another order, the same for any values."""

    def total(self, everyone, scores):
        order = torch.arange(everyone.shape[0], device=everyone.device).view(2, -1).t().reshape(-1)
        out = self.expert(everyone[order], 0)
        return torch.zeros_like(everyone).index_copy(0, order, out)


class Positions(Gathering):
    """A table is looked up by numbers that values chose: no row of the tokens moves."""

    def total(self, everyone, scores):
        table = torch.linspace(0, 1, 64, device=everyone.device).view(4, -1)
        looked_up = table[scores.argmax(-1) % 4] + table[scores.argmin(-1) % 4]
        return self.expert(everyone, 0) + looked_up


class AllTokens(Gathering):
    """Every expert takes all tokens, and a factor chooses."""

    def total(self, everyone, scores):
        return sum(self.expert(everyone, e) * scores[:, e, None] for e in range(self.local))


class ShardedParameter(Gathering):
    """A parameter is gathered, not tokens; a reduction of something else follows."""

    def forward(self, x):
        router = all_gather_tensor_autograd(self.router, 0, self.group)
        rows = torch.topk((x @ router[: x.shape[1]])[:, 0], self.room).indices
        out = x.index_copy(0, rows, self.expert(x[rows], 0))
        return reduce_scatter_tensor_autograd(out, "sum", 0, self.group)


class AroundExchanges(Gathering):
    """Gathered tokens go to experts by all-to-alls: what is in between is a region."""

    def __init__(self, width, hidden, local, group):
        super().__init__(width, hidden, local, group)
        self.layer = GroupedExperts(width, hidden, local * self.num_ranks, 1, group)

    def total(self, everyone, scores):
        return self.layer(everyone.bfloat16()).float()


DECOYS = (SequenceParallel, ZigZag, Positions, AllTokens, ShardedParameter, AroundExchanges)
