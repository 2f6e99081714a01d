"""Layers whose experts pick rows of tokens that the model gathers, as many as the router says.

All numbers are whole and small, so that no sum of them rounds in any order.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)

from tests.gathering_layers import GatheredByFunction, ScatteredByFunction, gathered


class Searched(nn.Module):
    """Rows found by a search, one expert after another; results added in place."""

    def __init__(self, width, hidden, local, top_k, group, favourite=0):
        super().__init__()
        self.group, self.local, self.top_k = group, local, top_k
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.first = self.rank * local
        shared = torch.Generator().manual_seed(0)
        own = torch.Generator().manual_seed(1 + self.rank)
        self.router = nn.Parameter(whole(width, local * self.num_ranks, generator=shared))
        self.register_buffer("bias", torch.arange(local * self.num_ranks) * float(favourite))
        self.w1 = nn.Parameter(whole(local, width, hidden, generator=own))
        self.w2 = nn.Parameter(whole(local, hidden, width, generator=own))
        self.scale = nn.Parameter(whole(local, width, generator=own))

    def forward(self, x):
        everyone, scores, chosen = self.gathered(x)
        total = self.total(everyone, scores, chosen)
        return reduce_scatter_tensor_autograd(total, "sum", 0, self.group)

    def route(self, x):
        """Return each token's factors, whole numbers, and its experts."""
        return (x @ self.router + self.bias.to(x.dtype)).topk(self.top_k)

    def gathered(self, x):
        scores, chosen = self.route(x)
        everyone = all_gather_tensor_autograd(x, 0, self.group)
        chosen = all_gather_tensor(chosen, 0, self.group)
        return everyone, all_gather_tensor_autograd(scores, 0, self.group), chosen

    def expert(self, rows, e):
        return F.relu((rows * self.scale[e]) @ self.w1[e]) @ self.w2[e]

    def total(self, everyone, scores, chosen):
        total = torch.zeros_like(everyone)
        for e in range(self.local):
            token, place = torch.where(chosen == self.first + e)
            out = self.expert(everyone[token], e)
            total.index_add_(0, token, out * scores[token, place, None])
        return total


def whole(*shape, generator):
    return torch.randint(-1, 2, shape, generator=generator).float()


class ByOffsets(Searched):
    """Rows sorted by expert, cut where counts that the host reads say; results added one by one."""

    def total(self, everyone, scores, chosen):
        order = torch.argsort(chosen.flatten(), stable=True)
        labels = torch.arange(self.local * self.num_ranks, device=chosen.device)
        ends = (chosen.reshape(-1, 1) == labels).sum(0).cumsum(0).tolist()
        total = everyone.new_zeros(everyone.shape)
        for e in range(self.first, self.first + self.local):
            rows = order[(ends[e - 1] if e else 0) : ends[e]]
            token = rows // self.top_k
            out = self.expert(everyone.index_select(0, token), e - self.first)
            out = scores.flatten()[rows].unsqueeze(-1) * out
            total = torch.index_add(total, 0, token, out)
        return total


class WrittenTwice(ByOffsets):
    """The index is computed for the rows, and again for the sums."""

    def total(self, everyone, scores, chosen):
        order = torch.argsort(chosen.flatten(), stable=True)
        labels = torch.arange(self.local * self.num_ranks, device=chosen.device)
        ends = (chosen.reshape(-1, 1) == labels).sum(0).cumsum(0).tolist()
        total = torch.zeros_like(everyone)
        for e in range(self.first, self.first + self.local):
            rows = order[(ends[e - 1] if e else 0) : ends[e]]
            out = self.expert(everyone[rows // self.top_k], e - self.first)
            factors = scores.flatten()[rows, None]
            total = total.index_add(0, rows // self.top_k, out * factors)
        return total


class Real(Searched):
    """Numbers that are not whole, experts without products: sums round, by their order alone."""

    def route(self, x):
        return torch.softmax(super().route(x * 0.3)[0], -1), super().route(x)[1]

    def expert(self, rows, e):
        return torch.tanh(rows * (self.scale[e] + 0.3)) * 1.7


class Grouped(Searched):
    """All local experts at once: grouped products of sorted rows."""

    def total(self, everyone, scores, chosen):
        order = torch.argsort(chosen.flatten(), stable=True)
        labels = torch.arange(self.local * self.num_ranks, device=chosen.device)
        counts = (chosen.reshape(-1, 1) == labels).sum(0)
        mine = counts[self.first : self.first + self.local]
        start, number = torch.stack([counts[: self.first].sum(), mine.sum()]).tolist()
        rows = order.narrow(0, start, number)
        token, ends = rows // self.top_k, mine.cumsum(0, dtype=torch.int32)
        hidden = F.relu(torch._grouped_mm(everyone[token], self.w1, offs=ends))
        out = torch._grouped_mm(hidden, self.w2, offs=ends)
        factors = scores.flatten()[rows, None].clamp(-1, 1)
        return torch.zeros_like(everyone).index_add(0, token, out * factors)


class RoutedTogether(Searched):
    """Every rank routes the gathered tokens, so that these are read by others than experts too."""

    def gathered(self, x):
        everyone = all_gather_tensor_autograd(x, 0, self.group)
        return everyone, *self.route(everyone)


class ByLayers(Searched):
    """Linear layers with biases, gate and up in one; a column of factors beside the rows."""

    def __init__(self, *sizes, **more):
        super().__init__(*sizes, **more)
        width, hidden, own = sizes[0], sizes[1], torch.Generator().manual_seed(7 + self.rank)
        self.up = nn.ModuleList(nn.Linear(width, 2 * hidden) for _ in range(self.local))
        self.down = nn.ModuleList(nn.Linear(hidden, width) for _ in range(self.local))
        with torch.no_grad():
            for parameter in (*self.up.parameters(), *self.down.parameters()):
                parameter.copy_(whole(*parameter.shape, generator=own))

    def expert(self, rows, e):
        gate, up = self.up[e](rows).chunk(2, -1)
        return self.down[e](F.relu(gate) * up)


class ByFunctions(Searched):
    """Both collectives of the tokens in Functions of the model, as Megatron-Core has them."""

    def forward(self, x):
        scores, chosen = self.route(x)
        everyone = GatheredByFunction.apply(x, self.group)
        chosen = gathered(chosen, self.group, self.num_ranks)
        scores = GatheredByFunction.apply(scores, self.group)
        return ScatteredByFunction.apply(self.total(everyone, scores, chosen), self.group)


class ByMask(Searched):
    """Rows by a mask of the tokens that chose the expert; results added where it holds."""

    def total(self, everyone, scores, chosen):
        total = torch.zeros_like(everyone)
        for e in range(self.local):
            of_e = chosen == self.first + e
            mask = of_e.any(-1)
            total[mask] += self.expert(everyone[mask], e) * (scores * of_e).sum(-1)[mask, None]
        return total


class AsMixtral(Searched):
    """The loop of transformers' Mixtral: one-hots transposed, rows taken behind a new dimension."""

    def total(self, everyone, scores, chosen):
        total = torch.zeros(everyone.shape, dtype=everyone.dtype, device=everyone.device)
        hot = F.one_hot(chosen, self.local * self.num_ranks).permute(2, 1, 0)
        for e in range(self.local):
            place, token = torch.where(hot[self.first + e])
            rows = everyone[None, token].reshape(-1, everyone.shape[1])
            out = self.expert(rows, e) * scores[token, place, None]
            total.index_add_(0, token, out.to(everyone.dtype))
        return total


class BatchesOfOne(Searched):
    """Rows pass each expert as a batch of one; results added to rows taken of the sums."""

    def total(self, everyone, scores, chosen):
        total = torch.zeros_like(everyone)
        for e in range(self.local):
            token, place = torch.where(chosen == self.first + e)
            out = self.expert(everyone[None, token, :], e)[0]
            total[token, :] = total[token, :] + out * scores[token, place, None]
        return total


class ChosenTwice(BatchesOfOne):
    """Every token chooses its expert twice: of two rows written to one place the last stays."""

    def route(self, x):
        scores, chosen = super().route(x)
        return scores, chosen[:, :1].expand_as(chosen).contiguous()


STYLES = (
    Searched, ByOffsets, ByMask, AsMixtral, BatchesOfOne, ChosenTwice, WrittenTwice, RoutedTogether,
    ByLayers, ByFunctions,
)  # fmt: skip


class TokensWritten(Searched):
    """The tokens are written once they are gathered, before the routing is."""

    def gathered(self, x):
        x = x * 1
        scores, chosen = self.route(x)
        everyone = all_gather_tensor_autograd(x, 0, self.group)
        x.zero_()
        chosen = all_gather_tensor(chosen, 0, self.group)
        return everyone, all_gather_tensor_autograd(scores, 0, self.group), chosen


class Centred(Searched):
    """What each row becomes depends on all rows."""

    def expert(self, rows, e):
        return super().expert(rows - rows.mean(0), e)


class Dropped(Searched):
    def expert(self, rows, e):
        return super().expert(F.dropout(rows, 0.5), e)


class WrittenInPlace(Searched):
    def expert(self, rows, e):
        return super().expert(rows, e).mul_(2)


class Kept(Searched):
    """Something made of the rows is read elsewhere."""

    def forward(self, x):
        self.kept = 0
        return super().forward(x) + self.kept

    def expert(self, rows, e):
        self.kept = self.kept + rows.sum()
        return super().expert(rows, e)


class ReadBetween(Searched):
    """The gathered tokens have another reader behind the first expert."""

    def total(self, everyone, scores, chosen):
        total = super().total(everyone, scores, chosen)
        self.late = (everyone @ self.router).sum()
        return total

    def forward(self, x):
        return super().forward(x) + self.late


class ReadAfter(Searched):
    """The gathered tokens have another reader behind all experts, whose gradient comes first."""

    def forward(self, x):
        everyone, scores, chosen = self.gathered(x)
        total = self.total(everyone, scores, chosen)
        total = reduce_scatter_tensor_autograd(total, "sum", 0, self.group)
        return total + (everyone @ self.router).sum()


class SumsRead(Searched):
    """The sums are reduced, and read by others too."""

    def forward(self, x):
        return super().forward(x) + self.seen

    def total(self, everyone, scores, chosen):
        total = super().total(everyone, scores, chosen)
        self.seen = total.sum()
        return total


class WrittenMeanwhile(Searched):
    """What the index is computed of is written between the two times."""

    def total(self, everyone, scores, chosen):
        total = torch.zeros_like(everyone)
        for e in range(self.local):
            token, place = torch.where(chosen == self.first + e)
            out = self.expert(everyone[token + 0], e) * scores[token, place, None]
            token.fill_(0)
            total = total.index_add(0, token + 0, out)
        return total


class TwoLoops(Searched):
    """A weight of all experts is read in two loops: its gradient is added up loop by loop."""

    def total(self, everyone, scores, chosen):
        found = [torch.where(chosen == self.first + e) for e in range(self.local)]
        square = self.w1[0] @ self.w2[0]
        rows = [everyone[token] @ square for token, _ in found]
        out = [torch.relu(r) @ square for r in rows]
        total = torch.zeros_like(everyone)
        for (token, place), one in zip(found, out, strict=True):
            total = total.index_add(0, token, one * scores[token, place, None])
        return total


class OntoTokens(Searched):
    """The sums begin with something else than zeros."""

    def total(self, everyone, scores, chosen):
        total = everyone @ self.w1[0] @ self.w2[0]
        for e in range(self.local):
            token, place = torch.where(chosen == self.first + e)
            out = self.expert(everyone[token], e) * scores[token, place, None]
            total = total.index_add(0, token, out)
        return total


class PutElsewhere(Searched):
    """Rows are added to other tokens than they were picked from."""

    def total(self, everyone, scores, chosen):
        total = torch.zeros_like(everyone)
        for e in range(self.local):
            token, place = torch.where(chosen == self.first + e)
            out = self.expert(everyone[token], e) * scores[token, place, None]
            total = total.index_add(0, (token + 1) % everyone.shape[0], out)
        return total


class ReadSums(Searched):
    """The sums are read before they are reduced."""

    def total(self, everyone, scores, chosen):
        total = super().total(everyone, scores, chosen)
        return total * 2


class OthersWritten(Searched):
    """Rows of some tokens are added to, and written to others."""

    def total(self, everyone, scores, chosen):
        total = torch.zeros_like(everyone)
        for e in range(self.local):
            token, place = torch.where(chosen == self.first + e)
            out = self.expert(everyone[token], e) * scores[token, place, None]
            total[(token + 1) % everyone.shape[0]] = total[token] + out
        return total


class NotOfRows(Searched):
    """What is added to the tokens of an expert is not made of them."""

    def total(self, everyone, scores, chosen):
        total = super().total(everyone, scores, chosen)
        token = torch.where(chosen == self.first)[0]
        return total.index_add_(0, token, self.scale[:1].expand(token.shape[0], -1))


class OneForAll(Searched):
    """All rows of an expert get the same: no row of what is added is made of its own."""

    def total(self, everyone, scores, chosen):
        total = torch.zeros_like(everyone)
        for e in range(self.local):
            token = torch.where(chosen == self.first + e)[0]
            total[token] += everyone[token].new_ones(1, everyone.shape[1]) * 2
        return total


class TypeOfRows(Searched):
    """A weight takes its type from the rows: what is made of both is no row."""

    def expert(self, rows, e):
        return super().expert(rows * self.scale[e].type_as(rows), e)


class AddedMeanwhile(Searched):
    """All rows of the sums are read before any is written: what one expert adds another loses."""

    def total(self, everyone, scores, chosen):
        total = torch.zeros_like(everyone)
        token = [torch.where(chosen == self.first + e)[0] for e in range(self.local)]
        before = [total[i] for i in token]
        for e in range(self.local):
            total[token[e]] = before[e] + self.expert(everyone[token[e]], e)
        return total
