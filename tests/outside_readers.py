"""MoE layers around which the graph reads, writes and draws what moving a region might disturb."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from tests.layers import WAIT, GroupedExperts, LoopExperts, all_to_all_single
from tests.this_torch import has_autocast_by_functions, has_hooks


class LegacyCounts(GroupedExperts):
    """Counts arrive in a tensor that `torch.distributed` fills in place, the commonest form."""

    def exchange_counts(self, counts):
        arrived = torch.empty_like(counts)
        dist.all_to_all_single(arrived, counts, group=self.group)
        self.arrived = arrived
        return arrived

    def forward(self, x):
        out = super().forward(x)
        return self.tell(out)

    def tell(self, out):
        return out, self.arrived


class LegacyCountsInStatistics(LegacyCounts):
    """What arrived is added to a statistic, seen through a view."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.register_buffer("load", torch.zeros(self.local))

    def tell(self, out):
        self.load.add_(self.arrived.view(self.num_ranks, -1).sum(0))
        return out


class LegacyCountsOnHost(LegacyCounts):
    """The host uses what arrived, as plain integers."""

    def tell(self, out):
        return out, self.arrived.tolist()


class CountsInAView(GroupedExperts):
    """Counts arrive in a part of a longer tensor, all of which is returned."""

    def exchange_counts(self, counts):
        self.longer = torch.full((counts.numel() + 2,), 7)
        arrived = self.longer[1:-1]
        arrived.copy_(WAIT(all_to_all_single(counts, None, None, self.group)))
        return arrived

    def forward(self, x):
        out = super().forward(x)
        return out, self.longer


class Between(GroupedExperts):
    """Something happens between dispatch and combine, knowing the split sizes."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.register_buffer("scale", torch.ones(3))

    def splits(self, counts, received):
        self.sent, self.got = super().splits(counts, received)
        return self.sent, self.got

    def experts(self, rows, received):
        self.seen = self.between(self.got[0] + self.sent[-1])
        return super().experts(rows, received)

    def forward(self, x):
        self.x = x
        out = super().forward(x)
        del self.x
        return out, self.seen


class WritesWhatWasRead(Between):
    """A buffer is read with a split size, then written, before the combine."""

    def between(self, n):
        ratio = self.scale * n
        self.scale.mul_(2.0)
        return ratio


class ReadsUnderAutocast(Between):
    """A product with a split size runs under autocast."""

    def between(self, n):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (self.x.float() * n) @ self.router.float()


class ReadsWithoutGradient(Between):
    """A product with a split size runs without gradients."""

    def between(self, n):
        with torch.no_grad():
            return self.x * n


class DrawsBetween(Between):
    """Dropout of something made with a split size; the generator is drawn from again later."""

    def between(self, n):
        return F.dropout(self.x.float() * n, 0.5)

    def forward(self, x):
        out, seen = super().forward(x)
        return F.dropout(out.float(), 0.5), seen


class AlsoRead(GroupedExperts):
    """The rows sent are read by two losses as well, before they are back."""

    def forward(self, x):
        scores, chosen = self.route(x)
        order = torch.argsort(chosen.reshape(-1), stable=True)
        counts = (chosen.reshape(-1)[:, None] == torch.arange(self.num_experts)).sum(0)
        received = self.exchange_counts(counts)
        sent, got = self.splits(counts, received)
        rows = x[order // self.top_k]
        arrived = all_to_all_single_autograd(rows, got, sent, self.group)
        losses = self.losses(rows, got[0] + got[-1])
        out = all_to_all_single_autograd(self.experts(arrived, received), sent, got, self.group)
        out = out * scores.reshape(-1)[order][:, None].to(out.dtype)
        return torch.zeros_like(x).index_add(0, order // self.top_k, out) + losses

    def losses(self, rows, n):
        return (rows * 0.37).mean() + (rows * rows).mean()


class AlsoReadOnce(AlsoRead):
    """One loss reads the rows sent: two terms make their gradient, in either order the same."""

    def losses(self, rows, n):
        return (rows * 0.37).mean()


class SharedRouting(GroupedExperts):
    """Two layers of experts exchange rows by one routing, with one exchange of counts."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.again = nn.Parameter(rand(self.local, width, width) * width**-0.5)

    def forward(self, x):
        scores, chosen = self.route(x)
        order = torch.argsort(chosen.reshape(-1), stable=True)
        counts = (chosen.reshape(-1)[:, None] == torch.arange(self.num_experts)).sum(0)
        received = self.exchange_counts(counts)
        sent, got = self.splits(counts, received)
        for experts in (self.experts, self.more_experts):
            rows = all_to_all_single_autograd(x[order // self.top_k], got, sent, self.group)
            out = all_to_all_single_autograd(experts(rows, received), sent, got, self.group)
            out = out * scores.reshape(-1)[order][:, None].to(out.dtype)
            x = x + torch.zeros_like(x).index_add(0, order // self.top_k, out)
        return x, sum(got)

    def more_experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        out = torch._grouped_mm(rows[perm], self.again, offs=offs)
        return torch.zeros_like(out).index_copy(0, perm, out)


class WrittenCounts(GroupedExperts):
    """The counts are written between their exchange and the experts that read them."""

    def splits(self, counts, received):
        sent, got = super().splits(counts, received)
        received.mul_(1)
        counts.zero_()
        return sent, got


class ChecksCounts(Between):
    """The user demands that few rows are sent to the last rank."""

    def between(self, n):
        torch._check(self.sent[-1] <= 2)
        return self.scale * n


class ChecksANumber(Between):
    """The user demands that a number of the host is another one; tracing then takes it for that."""

    def between(self, n):
        torch._check((self.x.detach() > 0).sum().item() == 7)
        return self.scale * n


class WeightReadTwiceAndOutside(GroupedExperts):
    """One weight of two grouped products, of which a loss beside the experts reads it as well."""

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        x = rows[perm]
        gate = torch._grouped_mm(x, self.w1, offs=offs)
        up = torch._grouped_mm(x.neg(), self.w1, offs=offs)
        out = torch._grouped_mm(F.silu(gate) * up, self.w2, offs=offs)
        return torch.zeros_like(out).index_copy(0, perm, out)

    def forward(self, x):
        return super().forward(x), (self.w1 * 0.37).sum()


class JoinedToAnEmptyVector(LoopExperts):
    """Results of half of the experts at a time join an empty vector, then are scaled row by row."""

    def __init__(self, width, hidden, experts, *more):
        super().__init__(width, hidden, 2 * experts, *more)

    def experts(self, rows, received):
        counts = received.tolist()
        parts = torch.split(super().experts(rows, received), counts)
        done = [None] * len(parts)
        for first in range(0, self.local, 2):
            mine = [i for i in range(len(parts)) if i % self.local in (first, first + 1)]
            joined = torch.cat([torch.tensor([], dtype=rows.dtype), *[parts[i] for i in mine]])
            scaled = joined * joined.amax(dim=1, keepdim=True)
            for i, part in zip(mine, scaled.split([counts[i] for i in mine]), strict=True):
                done[i] = part
        return torch.cat(done)


class HookWithCount(AlsoRead):
    """A gradient passes a hook that divides it by a split size."""

    def losses(self, rows, n):
        doubled = self.router * 2
        loss = doubled.sin().sum()
        doubled.register_hook(lambda gradient: gradient / n)
        return loss


class HookOnRows(GroupedExperts):
    """The gradient of the rows received passes a hook; the experts have read them by then."""

    def experts(self, rows, received):
        out = super().experts(rows, received)
        rows.register_hook(lambda gradient: gradient * 2)
        return out


class ReadAcross(AlsoRead):
    """One loss reads the rows sent across: its term lies in memory column by column."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.shift = nn.Parameter(rand(width))

    def forward(self, x):
        return super().forward(x.float() + self.shift.float())

    def route(self, x):
        return super().route(x.to(self.router.dtype))

    def experts(self, rows, received):
        return super().experts(rows.to(self.w1.dtype), received).float()

    def losses(self, rows, n):
        return (torch.sin(rows.t().contiguous()) * torch.linspace(0.1, 1, rows.shape[0])).sum()


class WeightsGivenAcross(GroupedExperts):
    """Weights of a grouped product are scaled, then transposed: their gradient lies so too."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.scale = nn.Parameter(torch.full((self.local, 1, 1), 0.7))

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        weights = (self.w1.float() * self.scale).to(rows.dtype).transpose(-2, -1)
        hidden = F.silu(torch._grouped_mm(rows[perm], weights, offs=offs))
        out = torch._grouped_mm(hidden, self.w2, offs=offs)
        return torch.zeros_like(out).index_copy(0, perm, out)


class SwitchesAutocast(Between):
    """Autocast is switched on and off by functions, not by `with`."""

    def between(self, n):
        torch.set_autocast_enabled("cpu", True)
        product = (self.x.detach().float() * n) @ self.router.detach().float()
        torch.set_autocast_enabled("cpu", False)
        return product


CHUNKED = (
    LegacyCounts, LegacyCountsInStatistics, LegacyCountsOnHost, WritesWhatWasRead,
    ReadsUnderAutocast, ReadsWithoutGradient, DrawsBetween, AlsoReadOnce, SharedRouting,
    WeightReadTwiceAndOutside, JoinedToAnEmptyVector, HookWithCount, WeightsGivenAcross,
)  # fmt: skip
WHOLE = (AlsoRead, WrittenCounts, CountsInAView, HookOnRows, ReadAcross, SwitchesAutocast)
NEEDED = {
    HookWithCount: has_hooks,
    HookOnRows: has_hooks,
    SwitchesAutocast: has_autocast_by_functions,
}
"""What a torch must capture for some of them."""
