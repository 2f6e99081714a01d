"""MoE layers with a capacity per expert, in the styles people write: even all-to-alls alone.

All take the rows of a rank and give `(output, auxiliary loss)`. E experts, L of them on each of
W ranks, C slots of capacity, M features, H hidden ones.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd

from moe_compile.journal.reasons import Reason
from tests.layers import ALL_TO_ALL, WAIT


class Capacity(nn.Module):
    """A router that gives each expert at most C rows of a rank, and drops the others."""

    def __init__(
        self, width, hidden, local, top_k, capacity_factor, group, dtype=torch.float32, seed=0
    ):
        super().__init__()
        self.num_ranks, self.local, self.group = dist.get_world_size(group), local, group
        self.num_experts, self.top_k = local * self.num_ranks, top_k
        self.capacity_factor, self.width, self.hidden = capacity_factor, width, hidden
        shared = torch.Generator().manual_seed(seed)  # equal on all ranks
        own = torch.Generator().manual_seed(seed + 1 + dist.get_rank(group))
        self.router = nn.Parameter(torch.randn(width, self.num_experts, generator=shared).to(dtype))
        self.make_experts(lambda *s: (torch.randn(*s, generator=own) * s[-2] ** -0.5).to(dtype))

    def make_experts(self, rand):
        self.w1 = nn.Parameter(rand(self.local, self.width, self.hidden))
        self.w2 = nn.Parameter(rand(self.local, self.hidden, self.width))

    def exchange(self, x):
        return all_to_all_single_autograd(x.contiguous(), None, None, self.group)

    def slots_for(self, num_tokens):
        return math.ceil(self.capacity_factor * num_tokens * self.top_k / self.num_experts)

    def route(self, x):
        """Return expert, slot, score and whether there is room, `[S, k]` each; C; the loss."""
        scores = torch.softmax((x @ self.router).float(), -1)
        top, chosen = torch.topk(scores, self.top_k, -1)
        capacity = self.slots_for(x.shape[0])
        hot = F.one_hot(chosen.reshape(-1), self.num_experts)
        slot = ((hot.cumsum(0) - 1) * hot).sum(-1).view(chosen.shape)
        loss = (scores.mean(0) * hot.float().mean(0)).sum() * self.num_experts
        return chosen, slot, top.to(x.dtype), slot < capacity, capacity, loss

    def masks(self, x):
        """Return GShard's combine weights and dispatch mask, `[S, E, C]`, C and the loss."""
        chosen, slot, score, room, capacity, loss = self.route(x)
        expert = F.one_hot(chosen, self.num_experts).to(x.dtype)
        place = F.one_hot(slot.clamp(max=capacity - 1), capacity).to(x.dtype)
        combine = torch.einsum("sk,ske,skc->sec", score * room, expert, place)
        return combine, (combine > 0).to(x.dtype), capacity, loss

    def buffer(self, x):
        """Return rows in their experts' slots, `[E C, M]`, each row's slot, its score, the loss."""
        chosen, slot, score, room, capacity, loss = self.route(x)
        none = self.num_experts * capacity
        index = torch.where(room, chosen * capacity + slot, none).reshape(-1)
        rows = x.repeat_interleave(self.top_k, 0)
        buffer = x.new_zeros(none + 1, x.shape[-1]).index_copy(0, index, rows)
        return buffer[:-1], index, score * room, loss

    def gather(self, slots, index, score):
        rows = torch.cat([slots, slots.new_zeros(1, slots.shape[-1])])[index]
        return (rows.view(*score.shape, -1) * score[..., None]).sum(1)


class GShardEinsum(Capacity):
    """Einsums for dispatch, experts and combine, as GShard writes them."""

    def forward(self, x):
        combine, dispatch, capacity, loss = self.masks(x)
        rows = self.exchange(torch.einsum("sec,sm->ecm", dispatch, x))
        rows = rows.view(self.num_ranks, self.local, capacity, -1)
        hidden = torch.relu(torch.einsum("gecm,emh->gech", rows, self.w1))
        out = torch.einsum("gech,ehm->gecm", hidden, self.w2)
        out = self.exchange(out.reshape(self.num_experts, capacity, -1))
        return torch.einsum("sec,ecm->sm", combine, out), loss


class Looped(Capacity):
    """One module per expert."""

    bias = False

    def make_experts(self, rand):
        self.experts = nn.ModuleList(self.make_expert(rand) for _ in range(self.local))

    def make_expert(self, rand):
        expert = nn.Sequential(
            nn.Linear(self.width, self.hidden, bias=self.bias),
            nn.ReLU(),
            nn.Linear(self.hidden, self.width, bias=self.bias),
        ).to(self.router.dtype)
        for parameter in expert.parameters():
            parameter.data.copy_(rand(1, *parameter.shape)[0])
        return expert


class DeepSpeed(Looped):
    """The form of DeepSpeed's: the experts cut and join, the buffer is sent by rank and expert."""

    def experts_of(self, inputs):
        chunks = inputs.chunk(self.local, dim=1)
        return torch.cat([e(c) for c, e in zip(chunks, self.experts, strict=True)], dim=1)

    def forward(self, x):
        combine, dispatch, _, loss = self.masks(x)
        dispatched = torch.einsum("sec,sm->ecm", dispatch.type_as(x), x)
        dispatched = self.exchange(dispatched)
        dispatched = dispatched.reshape(self.num_ranks, self.local, -1, x.shape[-1])
        out = self.exchange(self.experts_of(dispatched))
        out = out.reshape(self.num_ranks * self.local, -1, x.shape[-1])
        return torch.einsum("sec,ecm->sm", combine.type_as(x), out), loss


class CapacityOfTensors(DeepSpeed):
    """DeepSpeed's top-k gate computes its capacity so, and reads it."""

    def slots_for(self, num_tokens):
        factor = torch.tensor(self.capacity_factor * self.top_k)
        slots = torch.ceil((num_tokens / self.num_experts) * factor).to(torch.int64)
        return int(torch.maximum(slots, torch.tensor(1)))


def undropped(style):
    """Return a layer of `style` whose capacity is the rows of the fullest expert of any rank."""

    class Undropped(style):
        def masks(self, x):
            chosen, slot, score, _, _, loss = self.route(x)
            fullest = WAIT(all_reduce(slot.max() + 1, "max", self.group))
            capacity = fullest.item()
            torch._check(capacity > 1)
            place = (slot[..., None] == torch.arange(capacity)).to(x.dtype)
            expert = F.one_hot(chosen, self.num_experts).to(x.dtype)
            combine = torch.einsum("sk,ske,skc->sec", score, expert, place)
            return combine, (combine > 0).to(x.dtype), capacity, loss

    return Undropped


class BiasedDeepSpeed(DeepSpeed):
    """DeepSpeed's with biases: a lone contiguous chunk would add them in the product."""

    bias = True


class Tutel(Capacity):
    """Tutel's: rows copied to slots, experts as batched products with biases, GELU between."""

    def make_experts(self, rand):
        super().make_experts(rand)
        self.b1 = nn.Parameter(rand(self.local, 1, self.hidden))
        self.b2 = nn.Parameter(rand(self.local, 1, self.width))

    def forward(self, x):
        buffer, index, score, loss = self.buffer(x)
        y = self.exchange(buffer.view(self.num_ranks, self.local, -1, x.shape[-1]))
        y = y.permute(1, 0, 2, 3).contiguous().view(self.local, -1, x.shape[-1])
        y = F.gelu(torch.add(torch.matmul(y, self.w1), self.b1))
        y = torch.baddbmm(self.b2, y, self.w2)
        y = y.view(self.local, self.num_ranks, -1, x.shape[-1]).permute(1, 0, 2, 3)
        slots = self.exchange(y).view(-1, x.shape[-1])
        return self.gather(slots, index, score), loss


class Mesh(Capacity):
    """Mesh TensorFlow's: experts outermost, gated, a product of einsums."""

    def make_experts(self, rand):
        super().make_experts(rand)
        self.w3 = nn.Parameter(rand(self.local, self.width, self.hidden))

    def forward(self, x):
        combine, dispatch, capacity, loss = self.masks(x)
        rows = torch.einsum("sec,sm->ecm", dispatch, x).view(self.num_ranks, self.local, -1)
        rows = self.exchange(rows).view(self.num_ranks, self.local, capacity, -1)
        rows = rows.transpose(0, 1).reshape(self.local, -1, x.shape[-1])
        hidden = F.silu(torch.einsum("ecm,emh->ech", rows, self.w1))
        hidden = hidden * torch.einsum("ecm,emh->ech", rows, self.w3)
        out = torch.einsum("ech,ehm->ecm", hidden, self.w2)
        out = out.view(self.local, self.num_ranks, capacity, -1).transpose(0, 1)
        out = self.exchange(out).reshape(self.num_experts, capacity, -1)
        return torch.einsum("sec,ecm->sm", combine, out), loss


STYLES = (GShardEinsum, DeepSpeed, Tutel, Mesh)


class InOne(nn.Module):
    """A layer whose auxiliary loss is one more element of a flat output."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        output, loss = self.layer(x)
        return torch.cat([output.reshape(-1), loss.reshape(1).to(output.dtype)])


class SharedBias(Mesh):
    """A bias that all experts add: its gradient is a sum over them."""

    def make_experts(self, rand):
        super().make_experts(rand)
        self.shared = nn.Parameter(rand(1, self.hidden)[0])
        self.w3 = self.w1

    def experts_of(self, rows):
        return torch.bmm(torch.relu(torch.bmm(rows, self.w1) + self.shared), self.w2)

    def forward(self, x):
        buffer, index, score, loss = self.buffer(x)
        y = self.exchange(buffer.view(self.num_ranks, self.local, -1, x.shape[-1]))
        y = self.experts_of(y.transpose(0, 1).reshape(self.local, -1, x.shape[-1]))
        y = y.view(self.local, self.num_ranks, -1, x.shape[-1]).transpose(0, 1)
        return self.gather(self.exchange(y).view(-1, x.shape[-1]), index, score), loss


class LessMean(SharedBias):
    """Experts that see the mean of all experts' rows."""

    def experts_of(self, rows):
        rows = rows - rows.mean(0, keepdim=True)
        return torch.bmm(torch.relu(torch.bmm(rows, self.w1)), self.w2)


class NormOverExperts(SharedBias):
    """Experts whose rows are normalised by those of all experts."""

    def experts_of(self, rows):
        hidden = F.layer_norm(torch.bmm(rows, self.w1), (*rows.shape[:2], self.hidden))
        return torch.bmm(hidden, self.w2)


class NextExpert(SharedBias):
    """What one expert makes goes on as another's."""

    def experts_of(self, rows):
        hidden = torch.relu(torch.bmm(rows, self.w1))
        return torch.bmm(torch.cat([hidden[1:], hidden[:1]]), self.w2)


class InPlace(SharedBias):
    """Hidden rows are written in place."""

    def experts_of(self, rows):
        return torch.bmm(torch.bmm(rows, self.w1).relu_(), self.w2)


class DropsOut(SharedBias):
    """Draws random numbers."""

    def experts_of(self, rows):
        return torch.bmm(F.dropout(torch.bmm(rows, self.w1), 0.5, self.training), self.w2)


class Reduces(SharedBias):
    """Experts sharded by tensor parallelism: they communicate."""

    def experts_of(self, rows):
        partial = torch.bmm(torch.relu(torch.bmm(rows, self.w1)), self.w2)
        return all_reduce(partial, "sum", self.group)


class ReadReceived(SharedBias):
    """What was received is read by the loss too."""

    def experts_of(self, rows):
        self.seen = rows
        return torch.bmm(torch.relu(torch.bmm(rows, self.w1)), self.w2)

    def forward(self, x):
        output, loss = super().forward(x)
        return output, loss + self.seen.square().mean()


class TiedExperts(DeepSpeed):
    """Two experts of one module."""

    def make_experts(self, rand):
        super().make_experts(rand)
        self.experts[1] = self.experts[0]


class Reordered(DeepSpeed):
    """Results stand in another order than the rows they were made of."""

    def experts_of(self, inputs):
        chunks = inputs.chunk(self.local, dim=1)
        outputs = [e(c) for c, e in zip(chunks, self.experts, strict=True)]
        return torch.cat(outputs[::-1], dim=1)


class DetachedExpert(DeepSpeed):
    """One expert sends its rows no gradient."""

    def experts_of(self, inputs):
        first, *others = inputs.chunk(self.local, dim=1)
        outputs = [e(c) for c, e in zip([first.detach(), *others], self.experts, strict=True)]
        return torch.cat(outputs, dim=1)


class FrozenExpert(DeepSpeed):
    """One expert does not learn, and rows are sent no gradient."""

    def make_experts(self, rand):
        super().make_experts(rand)
        self.experts[0].requires_grad_(False)

    def exchange(self, x):
        return super().exchange(x if x.dim() > 3 else x.detach())


class NarrowExperts(Mesh):
    """SiLU of hidden rows that fill no whole vectors."""

    def __init__(self, width, hidden, *others, **options):
        super().__init__(width, hidden + 1, *others, **options)


class Decoy(nn.Module):
    """Even exchanges that bring no rows to experts."""

    def __init__(self, width, group):
        super().__init__()
        self.group, self.num_ranks = group, dist.get_world_size(group)
        self.weight = nn.Parameter(torch.randn(width, width))
        self.table = nn.Parameter(torch.randn(8, width))

    def exchange(self, x):
        return all_to_all_single_autograd(x.contiguous(), None, None, self.group)


class PipelineShuffle(Decoy):
    """Micro-batches travel on, through a layer, and back."""

    def forward(self, x):
        return self.exchange(torch.relu(self.exchange(x) @ self.weight))


class SequenceShuffle(Decoy):
    """Positions for features and back, a norm between."""

    def forward(self, x):
        there = self.exchange(x.view(self.num_ranks, -1, x.shape[-1]))
        normed = F.layer_norm(there, there.shape[-1:])
        return self.exchange(normed).view(x.shape)


class ShardedTable(Decoy):
    """Rows of a table that is sharded over ranks: indices there, rows back."""

    def forward(self, x):
        index = torch.arange(x.shape[0], device=x.device) % self.table.shape[0]
        wanted = WAIT(
            ALL_TO_ALL(index, self._halves(index), self._halves(index), self.group.group_name)
        )
        return x + self.exchange(F.embedding(wanted, self.table))

    def _halves(self, index):
        return [index.shape[0] // self.num_ranks] * self.num_ranks


class ScaledHeads(Decoy):
    """Each head has a scale of its own, between exchanges of heads: no weights of a product."""

    def forward(self, x):
        heads = self.exchange(x.view(self.num_ranks, 4, -1)).view(self.num_ranks, 4, -1)
        scaled = heads * self.weight[:4, :1]
        return self.exchange(scaled).view(x.shape)


class OneWay(Decoy):
    """Batched products with weights by index, and no exchange back."""

    def forward(self, x):
        rows = self.exchange(x.view(self.num_ranks, 4, -1)).view(self.num_ranks, 4, -1)
        rows = rows.view(4, -1, x.shape[-1])
        return torch.bmm(rows, self.weight.expand(4, -1, -1))


REFUSED = {
    SharedBias: Reason.SHARED_PARAMETER,
    LessMean: Reason.ROWS_MIXED,
    NormOverExperts: Reason.ROWS_MIXED,
    NextExpert: Reason.EXPERTS_LOST,
    InPlace: Reason.EXPERTS_LOST,
    DropsOut: Reason.EXPERTS_LOST,
    Reduces: Reason.COMMUNICATES,
    ReadReceived: Reason.ESCAPES,
    TiedExperts: Reason.SHARED_PARAMETER,
    Reordered: Reason.EXPERTS_LOST,
    DetachedExpert: Reason.NO_GRADIENT,
    FrozenExpert: Reason.NO_GRADIENT,
}
DECOYS = (PipelineShuffle, SequenceShuffle, ShardedTable, ScaledHeads, OneWay)
