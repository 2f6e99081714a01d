"""MoE layers in Megatron-Core's form, and others that send several tensors or exchange twice."""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_to_all_single,
    all_to_all_single_autograd,
)

from tests.layers import WAIT, Routed


class MegatronLayer(Routed):
    """A routing map `[T, E]`; counts all-gathered; probabilities travel beside the tokens.

    Rows are sorted by local expert by cutting them in chunks and joining these in another order.
    """

    def __init__(self, width, hidden, experts, top_k, group, dtype=torch.bfloat16, seed=0):
        super().__init__(width, hidden, experts, top_k, group, dtype, seed)
        self.rank = dist.get_rank(group)
        numbers = torch.arange(experts)
        self.by_expert = numbers.view(-1, self.local).T.ravel().tolist()
        self.by_rank = numbers.view(self.local, -1).T.ravel().tolist()

    def forward(self, x):
        scores, chosen = self.route(x)
        routing = torch.zeros(x.shape[0], self.num_experts, dtype=torch.bool, device=x.device)
        routing = routing.scatter(1, chosen, True)
        probs = torch.zeros_like(routing, dtype=scores.dtype).scatter(1, chosen, scores)
        sent, got, runs, by_runs, per_expert = self.counted(routing.sum(0))
        rows, row_probs, order = self.permute(x, probs, routing)
        rows, row_probs = self.dispatch(rows, row_probs, got, sent)
        rows, row_probs = self.by_local_expert(rows, row_probs, runs)
        out = self.experts(rows, row_probs, per_expert)
        out = torch.cat([torch.split(out, by_runs)[i] for i in self.by_rank])
        out = all_to_all_single_autograd(out, sent, got, self.group)
        return self.unpermute(x, out, order, probs, routing)

    def counted(self, counts):
        sent = counts.reshape(self.num_ranks, self.local).sum(axis=1)
        everyone = WAIT(all_gather_tensor(counts, 0, self.group))
        everyone = everyone.reshape(self.num_ranks, 1, self.num_experts).transpose(0, 1)
        first = self.rank * self.local
        mine = everyone[:, :, first : first + self.local].contiguous()
        got = mine.sum(axis=2)[0]
        per_expert = mine.sum(dim=(0, 1))
        runs = mine.view(-1, self.local)
        on_host = [t.to("cpu", non_blocking=True) for t in (per_expert, sent, got, runs)]
        per_expert, sent, got, runs = on_host
        by_runs = runs.T.ravel().tolist()
        return sent.tolist(), got.tolist(), runs.ravel().tolist(), by_runs, per_expert.tolist()

    def permute(self, x, probs, routing):
        chosen = routing.T.contiguous()
        tokens = torch.arange(x.shape[0], device=x.device).unsqueeze(0)
        order = tokens.expand(self.num_experts, -1).masked_select(chosen)
        return x.index_select(0, order), probs.T.contiguous().masked_select(chosen), order

    def dispatch(self, rows, probs, got, sent):
        rows = all_to_all_single_autograd(rows, got, sent, self.group)
        return rows, all_to_all_single_autograd(probs, got, sent, self.group)

    def by_local_expert(self, rows, probs, runs):
        pieces, factors = torch.split(rows, runs), torch.split(probs, runs)
        rows = torch.cat([pieces[i] for i in self.by_expert])
        return rows, torch.cat([factors[i] for i in self.by_expert])

    def experts(self, rows, probs, per_expert):
        """SequentialMLP: one expert after the other, each on its part of rows and factors."""
        parts = zip(torch.split(rows, per_expert), torch.split(probs, per_expert), strict=True)
        return torch.cat([self.expert(e, part, p) for e, (part, p) in enumerate(parts)])

    def expert(self, e, rows, probs):
        inner = F.silu(rows @ self.w1[e]) * (rows @ self.w3[e])
        return (inner * probs.unsqueeze(-1)).to(rows.dtype) @ self.w2[e]

    def unpermute(self, x, out, order, probs, routing):
        del probs, routing
        where = order.unsqueeze(1).expand(-1, out.shape[1])
        return torch.zeros_like(x).scatter_add_(0, where, out)


class Placed(NamedTuple):
    """What is known of the rows of one step: split sizes, received counts, the order by expert."""

    sent: list
    got: list
    received: torch.Tensor
    perm: torch.Tensor


class Sends(Routed):
    """Rows sorted by expert and permuted; what else travels is the style's own part."""

    def forward(self, x):
        scores, chosen = self.route(x)
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = (flat[:, None] == torch.arange(self.num_experts, device=x.device)).sum(0)
        received = self.exchange_counts(counts)
        sent, got = self.splits(counts, received)
        factors = scores.reshape(-1)[order]
        perm = torch.argsort(self.expert_of_sent(received, sum(got)), stable=True)
        return self.run(x, order // self.top_k, factors, Placed(sent, got, received, perm))

    def expert_of_sent(self, received, num_rows):
        ids = torch.arange(self.local, device=received.device).repeat(self.num_ranks)
        return torch.repeat_interleave(ids, received, output_size=num_rows)

    def there(self, tensor, at):
        return all_to_all_single_autograd(tensor, at.got, at.sent, self.group)

    def back(self, tensor, at):
        return all_to_all_single_autograd(tensor, at.sent, at.got, self.group)

    def split_by_expert(self, at, *tensors):
        """Return each tensor in one part per local expert."""
        counts = at.received.view(self.num_ranks, -1).sum(0).tolist()
        return zip(*(torch.split(tensor[at.perm], counts) for tensor in tensors), strict=True)

    def in_order(self, at, out):
        return torch.zeros_like(out).index_copy(0, at.perm, out)

    def expert(self, e, x):
        return (F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e]


class ScaledRows(Sends):
    """Rows travel over their largest entry, and these entries, `[R, 1]`, before them."""

    def run(self, x, token, factors, at):
        rows = x[token]
        scale = rows.detach().abs().amax(1, keepdim=True) + 1
        scales = self.there(scale, at)
        rows = self.there(rows / scale, at) * scales
        out = torch.cat(
            [self.expert(e, part) for e, (part,) in enumerate(self.split_by_expert(at, rows))]
        )
        out = self.back(self.in_order(at, out), at) * factors[:, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, out)


class TwoBack(Sends):
    """Experts send back rows and, for each, how sure they are; tokens travel with two tensors."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.sure = nn.Parameter(rand(self.local, width))

    def run(self, x, token, factors, at):
        rows = self.there(x[token], at)
        factors = self.there(factors, at)
        outs, sures = [], []
        for e, (part, factor) in enumerate(self.split_by_expert(at, rows, factors)):
            outs.append(self.expert(e, part) * factor[:, None].to(x.dtype))
            sures.append((part * self.sure[e]).sum(-1))
        out = self.back(self.in_order(at, torch.cat(outs)), at)
        sure = self.back(self.in_order(at, torch.cat(sures)), at)
        return torch.zeros_like(x).index_add(0, token, out * sure[:, None])


class TwoSteps(Sends):
    """One exchange of counts for two dispatches, the second of what the first brought back."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.w4 = nn.Parameter(rand(self.local, width, width))

    def run(self, x, token, factors, at):
        rows = self.there(x[token], at)
        parts = self.split_by_expert(at, rows)
        out = torch.cat([self.expert(e, part) for e, (part,) in enumerate(parts)])
        out = self.back(self.in_order(at, out), at) * factors[:, None].to(x.dtype)
        rows = self.there(out + x[token], at)
        parts = self.split_by_expert(at, rows)
        again = torch.cat([F.silu(part @ self.w4[e]) for e, (part,) in enumerate(parts)])
        again = self.back(self.in_order(at, again), at)
        return torch.zeros_like(x).index_add(0, token, out + again)


class TwoStacks(TwoSteps):
    """One exchange of counts for two stacks of experts side by side."""

    def run(self, x, token, factors, at):
        first, second = self.there(x[token], at), self.there(x[token] * 2, at)
        parts = self.split_by_expert(at, first)
        out = torch.cat([self.expert(e, part) for e, (part,) in enumerate(parts)])
        parts = self.split_by_expert(at, second)
        other = torch.cat([F.silu(part @ self.w4[e]) for e, (part,) in enumerate(parts)])
        out, other = (self.back(self.in_order(at, t), at) for t in (out, other))
        return torch.zeros_like(x).index_add(0, token, (out + other) * factors[:, None].to(x.dtype))


class TwoHops(Routed):
    """Rows go to their node first, to the rank in it then, and back the same way.

    Ranks are numbered node by node; `across` joins ranks of one place, `within` those of a node.
    """

    def __init__(self, width, hidden, experts, top_k, across, within, dtype=torch.bfloat16, seed=0):
        super().__init__(width, hidden, experts, top_k, dist.group.WORLD, dtype, seed)
        self.across, self.within = across, within
        self.num_nodes, self.per_node = (dist.get_world_size(g) for g in (across, within))

    def forward(self, x):
        scores, chosen = self.route(x)
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = (flat[:, None] == torch.arange(self.num_experts, device=x.device)).sum(0)
        out = self.hop(
            x[order // self.top_k], counts, self.num_nodes, self.across, self.within_node
        )
        out = out * scores.reshape(-1)[order][:, None].to(out.dtype)
        return torch.zeros_like(x).index_add(0, order // self.top_k, out)

    def hop(self, rows, counts, num_peers, group, inner):
        """Send rows, `counts` of each kind, to `num_peers`; `inner` takes them kind by kind."""
        received = WAIT(all_to_all_single(counts, None, None, group))
        sent, got = (c.view(num_peers, -1).sum(1).tolist() for c in (counts, received))
        rows = all_to_all_single_autograd(rows, got, sent, group)
        kinds = received.shape[0] // num_peers
        ids = torch.arange(kinds, device=rows.device).repeat(num_peers)
        ids = torch.repeat_interleave(ids, received, output_size=rows.shape[0])
        order = torch.argsort(ids, stable=True)
        out = inner(rows[order], received.view(num_peers, kinds).sum(0))
        out = torch.zeros_like(out).index_copy(0, order, out)
        return all_to_all_single_autograd(out, sent, got, group)

    def within_node(self, rows, counts):
        return self.hop(rows, counts, self.per_node, self.within, self.experts)

    def experts(self, rows, counts):
        parts = torch.split(rows, counts.tolist())
        return torch.cat([self.expert(e, part) for e, part in enumerate(parts)])

    def expert(self, e, x):
        return (F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e]
