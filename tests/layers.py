"""MoE layers in the styles people write, over one process group, functional collectives only."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_to_all_single,
    all_to_all_single_autograd,
)

ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single
WAIT = torch.ops._c10d_functional.wait_tensor


class Routed(nn.Module):
    """Top-k softmax router, uneven exchange there and back; `experts` is the style's own part."""

    def __init__(self, width, hidden, experts, top_k, group, dtype=torch.bfloat16, seed=0):
        super().__init__()
        self.num_ranks = dist.get_world_size(group)
        self.num_experts, self.top_k, self.group = experts, top_k, group
        self.local = experts // self.num_ranks
        shared = torch.Generator().manual_seed(seed)  # equal on all ranks
        own = torch.Generator().manual_seed(seed + 1 + dist.get_rank(group))
        self.router = nn.Parameter(torch.randn(width, experts, generator=shared).to(dtype) * 0.3)
        self.make_experts(width, hidden, lambda *s: torch.randn(*s, generator=own).to(dtype))

    def make_experts(self, width, hidden, rand):
        e = self.local
        self.w1 = nn.Parameter(rand(e, width, hidden) * width**-0.5)
        self.w3 = nn.Parameter(rand(e, width, hidden) * width**-0.5)
        self.w2 = nn.Parameter(rand(e, hidden, width) * hidden**-0.5)

    def route(self, x):
        scores, chosen = torch.topk(torch.softmax((x @ self.router).float(), -1), self.top_k, -1)
        return scores, chosen

    def tally(self, flat):
        return (flat[:, None] == torch.arange(self.num_experts, device=flat.device)).sum(0)

    def exchange_counts(self, counts):
        return WAIT(all_to_all_single(counts, None, None, self.group))

    def forward(self, x):
        scores, chosen = self.route(x)
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = self.tally(flat)
        received = self.exchange_counts(counts)
        sent_rows, got_rows = self.splits(counts, received)
        rows = x[order // self.top_k]
        rows = all_to_all_single_autograd(rows, got_rows, sent_rows, self.group)
        out = self.experts(rows, received)
        out = all_to_all_single_autograd(out, sent_rows, got_rows, self.group)
        out = out * scores.reshape(-1)[order][:, None].to(out.dtype)
        return torch.zeros_like(x).index_add(0, order // self.top_k, out)

    def splits(self, counts, received):
        sent = counts.view(self.num_ranks, -1).sum(1).tolist()
        got = received.view(self.num_ranks, -1).sum(1).tolist()
        return sent, got

    def expert_of_rows(self, rows, received):
        ids = torch.arange(self.local, device=rows.device).repeat(self.num_ranks)
        return torch.repeat_interleave(ids, received, output_size=rows.shape[0])


class GroupedExperts(Routed):
    """Rows permuted to expert-major order by argsort, grouped GEMM, index_copy back."""

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        x = rows[perm]
        gate = F.silu(torch._grouped_mm(x, self.w1, offs=offs))
        h = gate * torch._grouped_mm(x, self.w3, offs=offs)
        out = torch._grouped_mm(h, self.w2, offs=offs)
        return torch.zeros_like(out).index_copy(0, perm, out)


class Centred(GroupedExperts):
    """Subtracts the mean over all rows received: they are not independent, nothing is chunked."""

    def experts(self, rows, received):
        return super().experts(rows - rows.mean(0), received)


class KeepsSplits(GroupedExperts):
    """Stashes its split sizes on the module, as torchtitan does."""

    def splits(self, counts, received):
        self.sent, self.got = super().splits(counts, received)
        return self.sent, self.got


class LoopExperts(Routed):
    """One Python loop over experts; rows split by a list of counts."""

    def splits(self, counts, received):
        self._counts = received.tolist()
        sent = counts.view(self.num_ranks, -1).sum(1).tolist()
        e = self.local
        return sent, [sum(self._counts[r * e : (r + 1) * e]) for r in range(self.num_ranks)]

    def experts(self, rows, received):
        counts, self._counts = self._counts, None
        parts = torch.split(rows, counts)
        done = [None] * len(parts)
        for e in range(self.local):
            mine = range(e, len(parts), self.local)
            x = torch.cat([parts[i] for i in mine])
            y = self.expert(x, e)
            for i, piece in zip(mine, torch.split(y, [counts[i] for i in mine]), strict=True):
                done[i] = piece
        return torch.cat(done)

    def expert(self, x, e):
        return (F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e]


class FusedGateUp(Routed):
    """One weight for gate and up, a bias per expert on both GEMMs, unpermute by the inverse."""

    def make_experts(self, width, hidden, rand):
        e = self.local
        self.w13 = nn.Parameter(rand(e, width, 2 * hidden) * width**-0.5)
        self.b13 = nn.Parameter(rand(e, 2 * hidden) * 0.1)
        self.w2 = nn.Parameter(rand(e, hidden, width) * hidden**-0.5)
        self.b2 = nn.Parameter(rand(e, width) * 0.1)

    def experts(self, rows, received):
        ids, perm = torch.sort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0).to(torch.int32)
        h = torch._grouped_mm(rows[perm], self.w13, offs=offs) + self.b13[ids]
        gate, up = h.chunk(2, -1)
        out = torch._grouped_mm(F.silu(gate) * up, self.w2, offs=offs) + self.b2[ids]
        return out[torch.argsort(perm)]


class SortedChunks(Routed):
    """Megatron's style: a routing map, and whole runs of rows sorted by index, there and back."""

    def forward(self, x):
        scores, chosen = self.route(x)
        mask = torch.zeros(x.shape[0], self.num_experts, dtype=torch.bool, device=x.device)
        mask = mask.scatter(1, chosen, True)
        probs = torch.zeros_like(mask, dtype=scores.dtype).scatter(1, chosen, scores)
        tokens = torch.arange(x.shape[0], device=x.device).expand(self.num_experts, -1)
        routed = torch.argsort(mask.T.logical_not().to(torch.int8).reshape(-1), stable=True)
        routed = routed[: x.shape[0] * self.top_k]
        order = tokens.reshape(-1)[routed]
        counts = mask.sum(0)
        received = WAIT(all_to_all_single(counts, None, None, self.group))
        self._runs = received.tolist()
        sent = counts.view(self.num_ranks, -1).sum(1).tolist()
        e = self.local
        got = [sum(self._runs[r * e : (r + 1) * e]) for r in range(self.num_ranks)]
        rows = all_to_all_single_autograd(x[order], got, sent, self.group)
        out = all_to_all_single_autograd(self.experts(rows, received), sent, got, self.group)
        out = out * probs.T.reshape(-1)[routed][:, None].to(out.dtype)
        return torch.zeros_like(x).index_add(0, order, out)

    def experts(self, rows, received):
        runs, self._runs = self._runs, None
        n, e = self.num_ranks, self.local
        by_expert = [r * e + j for j in range(e) for r in range(n)]
        pieces = torch.split(rows, runs)
        x = torch.cat([pieces[i] for i in by_expert])
        offs = torch.cumsum(received.view(n, e).sum(0), 0, dtype=torch.int32)
        h = F.silu(torch._grouped_mm(x, self.w1, offs=offs))
        h = h * torch._grouped_mm(x, self.w3, offs=offs)
        out = torch._grouped_mm(h, self.w2, offs=offs)
        back = torch.split(out, [runs[i] for i in by_expert])
        by_rank = [by_expert.index(i) for i in range(n * e)]
        return torch.cat([back[i] for i in by_rank])


class SharedAndBias(GroupedExperts):
    """Sigmoid router with a balancing bias updated in place, token counters, a shared expert."""

    def __init__(self, width, hidden, experts, top_k, group, dtype=torch.bfloat16, seed=0):
        super().__init__(width, hidden, experts, top_k, group, dtype, seed)
        shared = torch.Generator().manual_seed(seed + 7)
        self.up = nn.Parameter(torch.randn(width, hidden, generator=shared).to(dtype) * 0.1)
        self.down = nn.Parameter(torch.randn(hidden, width, generator=shared).to(dtype) * 0.1)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("seen", torch.zeros(experts))

    def route(self, x):
        scores = torch.sigmoid((x @ self.router).float())
        _, chosen = torch.topk(scores + self.bias, self.top_k, -1)
        return scores.gather(1, chosen), chosen

    def forward(self, x):
        with torch.no_grad():
            _, chosen = self.route(x)
            every = torch.arange(self.num_experts, device=x.device)
            load = (chosen.reshape(-1, 1) == every).sum(0)
            self.seen.add_(load)
        out = super().forward(x) + F.silu(x @ self.up) @ self.down
        with torch.no_grad():
            self.bias += 0.01 * torch.sign(load.float().mean() - load)
        return out


class GatheredCounts(GroupedExperts):
    """Every rank sees the counts of all ranks for all experts, and takes its own columns."""

    def exchange_counts(self, counts):
        everyone = WAIT(all_gather_tensor(counts, 0, self.group))
        mine = dist.get_rank(self.group) * self.local
        return everyone.view(self.num_ranks, -1)[:, mine : mine + self.local].reshape(-1)


class SegmentStarts(Routed):
    """torchtitan 0.3's dispatcher: counts travel as a matrix, rows are found from where the run of
    each (expert, rank) starts, and go back into uninitialised memory."""

    def exchange_counts(self, counts):
        return WAIT(all_to_all_single(counts.view(self.num_ranks, -1), None, None, self.group))

    def splits(self, counts, received):
        sent = counts.view(self.num_ranks, -1).sum(dim=1).to("cpu", non_blocking=True)
        got = received.reshape(-1).view(self.num_ranks, -1).sum(dim=1).to("cpu")
        return sent.tolist(), got.tolist()

    def experts(self, rows, received):
        flat = received.reshape(-1)
        starts = (flat.cumsum(0) - flat).view(self.num_ranks, -1).t().reshape(-1)
        lengths = flat.view(self.num_ranks, -1).t().reshape(-1)
        runs = torch.arange(lengths.shape[0], device=rows.device)
        run = runs.repeat_interleave(lengths, output_size=rows.shape[0])
        place = torch.arange(run.shape[0], device=rows.device)
        source = starts[run] + place - (lengths.cumsum(0) - lengths)[run]
        offs = torch.cumsum(flat.view(self.num_ranks, -1).sum(0), dim=0, dtype=torch.int32)
        x = rows[source, :]
        h = F.silu(torch._grouped_mm(x, self.w1, offs=offs))
        h = h * torch._grouped_mm(x, self.w3, offs=offs)
        out = torch._grouped_mm(h, self.w2, offs=offs)
        back = out.new_empty(rows.shape)
        back[source, :] = out
        return back


STYLES = (
    GroupedExperts, LoopExperts, FusedGateUp, SortedChunks, SharedAndBias, GatheredCounts,
    SegmentStarts,
)  # fmt: skip
