"""Blocks drawn of steps that keep sequences apart, experts in drawn forms, and steps that mix.

Every step takes the sizes of what it is given, so that a block runs on any number of sequences.
"""

import functools
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor

from tests.dispatch_layers import Around
from tests.layers import WAIT, GroupedExperts

WIDTH, HIDDEN, EXPERTS, HEADS = 32, 32, 4, 2
DTYPE = torch.bfloat16


def attention(m, x, kv=HEADS, **options):
    kinds = (m.q, m.k[:, : kv * WIDTH // HEADS], m.v[:, : kv * WIDTH // HEADS])
    heads = ((x @ w).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for w in kinds)
    found = F.scaled_dot_product_attention(*heads, **options)
    return x + found.transpose(1, 2).reshape(x.shape)


def masked_attention(m, x):
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return attention(m, x, attn_mask=mask)


def autocast_attention(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return attention(m, x, is_causal=True)


def without_gradients(m, x):
    with torch.no_grad():
        scale = torch.sigmoid(x.mean(-1, keepdim=True))
    return x * scale


def rotated(m, x):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = pairs * m.angles[: x.shape[1]].view(1, x.shape[1], -1)
    return torch.view_as_real(turned).flatten(2).type_as(x)


def positions_first(m, x):
    turned = x.transpose(0, 1).contiguous()
    return torch.tanh(turned @ m.up).transpose(0, 1) + x


def with_token(m, x):
    return torch.cat([m.shift.expand(x.shape[0], 1, -1), x], 1)


APART = {
    "norm": lambda m, x: F.rms_norm(x, (WIDTH,), m.gain),
    "layer norm": lambda m, x: F.layer_norm(x, (WIDTH,), m.gain, m.shift),
    "linear": lambda m, x: x + F.linear(x, m.up, m.shift),
    "gated": lambda m, x: x + (F.silu(x @ m.up) * (x @ m.gate)) @ m.up,
    "computed weight": lambda m, x: x @ torch.tanh(m.up + m.gate) + x,
    "scaled twice": lambda m, x: (x * m.gain) @ m.gate * m.gain,
    "attention": functools.partial(attention, is_causal=True),
    "attention to all": attention,
    "fewer KV heads": functools.partial(attention, kv=1, enable_gqa=True),
    "masked attention": masked_attention,
    "attention under autocast": autocast_attention,
    "without gradients": without_gradients,
    "rotated": rotated,
    "positions first": positions_first,
    "positions summed": lambda m, x: x + x.sum(1, keepdim=True) / 8,
    "running sum": lambda m, x: torch.cumsum(x, 1) / 4,
    "by position": lambda m, x: x * m.table[: x.shape[1], None],
    "onto zeros": lambda m, x: torch.zeros(x.shape, dtype=x.dtype) + x * 2,
    "onto new zeros": lambda m, x: x.new_zeros(len(x), 1, WIDTH) + x,
    "times ones": lambda m, x: torch.ones(x.shape[:2], dtype=x.dtype)[..., None] * x,
    "halves": lambda m, x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "stacked": lambda m, x: torch.stack([x, x * m.gain], 2).mean(2),
    "largest": lambda m, x: x + x.gather(-1, torch.topk(x, WIDTH, -1)[1]),
    "chosen by a sign": lambda m, x: torch.where(x > 0, x, x * 0.1),
    "products": lambda m, x: x + (x @ x.transpose(1, 2) / 16) @ x,
    "einsum": lambda m, x: x + torch.einsum("bsd,de->bse", x, m.gate),
    "looked up": lambda m, x: x + m.table[(x.sum(-1) > 0).long()][..., None],
    "single rows of a weight": lambda m, x: x * m.up[0] + m.up[1],
    "one row of a weight twice": lambda m, x: x * m.up[-1] + m.up[WIDTH - 1],
    "rows": lambda m, x: (x.flatten(0, 1) @ m.up).unflatten(0, x.shape[:2]) + x,
    "a token ahead of each": lambda m, x: with_token(m, x).cumsum(1)[:, 1:] / 4,
    "queries of a weight": lambda m, x: x * m.up[: x.shape[1]].repeat(len(x), 1, 1),
    "a row for each token": lambda m, x: (
        x + m.gain.repeat(x.shape[0] * x.shape[1], 1).view(x.shape)
    ),
    "a weight expanded": lambda m, x: x + torch.tanh(m.shift).expand(x.shape),
    "positions and features": lambda m, x: x.flatten(1).unflatten(1, x.shape[1:]) * m.gain,
}
MIXED = {
    "mean of sequences": lambda m, x: x - x.mean(0),
    "running sum of sequences": lambda m, x: torch.cumsum(x, 0) / 4,
    "first sequence": lambda m, x: x + x[:1],
    "softmax over sequences": lambda m, x: x + torch.softmax(x, 0),
    "turned round": lambda m, x: x.flip(0),
    "dropout": lambda m, x: F.dropout(x, 0.5),
    "largest of all": lambda m, x: x / x.amax((0, 1, 2), keepdim=True),
    "tokens before": lambda m, x: x + torch.roll(x.flatten(0, 1), 1, 0).view(x.shape),
    "sums of other tokens": lambda m, x: x + x.transpose(0, 1).reshape(x.shape),
}


class Drawn(Around):
    """Experts whose counts, gather, weights and sums are written in forms that were drawn."""

    forms: ClassVar = {}

    def route(self, x):
        logits = (x @ self.router).float()
        if self.forms["scores"] == "softmax of chosen":
            logits, chosen = torch.topk(logits, self.top_k, -1)
            return torch.softmax(logits, -1), chosen
        scores = torch.sigmoid(logits)
        if self.forms["scores"] == "gathered":
            chosen = torch.topk(scores + self.bias, self.top_k, -1)[1]
            return scores.gather(1, chosen), chosen
        return torch.topk(scores, self.top_k, -1)

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.register_buffer("bias", torch.arange(self.num_experts) / 100)
        self.register_buffer("seen", torch.zeros(self.num_experts))

    def by_expert(self, flat):
        if self.forms["order"] == "sort":
            return torch.sort(flat, stable=True)[1]
        return super().by_expert(flat)

    def exchange_counts(self, counts):
        if self.forms["counted"]:
            with torch.no_grad():
                self.seen.add_(counts)
        if self.forms["counts"] == "all-to-all":
            return super().exchange_counts(counts)
        everyone = WAIT(all_gather_tensor(counts, 0, self.group)).view(self.num_ranks, -1)
        return everyone[:, : self.local].reshape(-1)

    def gather(self, x, order, scores):
        index = order // self.top_k
        if self.forms["gather"] == "index_select":
            rows = x.index_select(0, index)
        else:
            rows = x[index, :] if self.forms["gather"] == "x[index, :]" else x[index]
        if self.forms["weights"] == "before":
            rows = (rows.float() * scores.reshape(-1)[order].reshape(-1, 1)).to(x.dtype)
        return rows

    def total(self, x, order, out, scores):
        if self.forms["weights"] == "after":
            out = out * scores.reshape(-1)[order][:, None].to(out.dtype)
        if self.forms["sums"] in ("in order", "by weights"):
            return self.in_order(x, order, out, scores)
        return self.base(x).index_add(0, order // self.top_k, out)

    def in_order(self, x, order, out, scores):
        slots = torch.zeros((len(x) * self.top_k, x.shape[1]), dtype=x.dtype)
        slots[order] = out
        slots = slots.reshape(-1, self.top_k, x.shape[1])
        if self.forms["sums"] == "in order":
            return slots.sum(dim=1)
        weights = scores.reshape(-1, 1, self.top_k)
        return torch.bmm(weights, slots.float()).to(x.dtype).squeeze(1)

    def base(self, x):
        kind = self.forms["sums"]
        if kind == "zeros like":
            return torch.zeros_like(x)
        if kind == "zeros":
            return torch.zeros(len(x), x.shape[1], dtype=x.dtype)
        if kind == "new zeros":
            return x.new_zeros(x.shape)
        return torch.ones(x.shape, dtype=x.dtype) if kind == "ones" else x * 2


FORMS = {
    "scores": ("softmax of chosen", "sigmoid", "gathered"),
    "order": ("argsort", "sort"),
    "counts": ("all-to-all", "gathered"),
    "counted": (False, True),
    "gather": ("x[index]", "x[index, :]", "index_select"),
    "weights": ("after", "before", "none"),
    "sums": ("zeros like", "zeros", "new zeros", "ones", "tokens", "in order", "by weights"),
}
TALLIES = {
    "compare": GroupedExperts.tally,
    "bincount": lambda self, flat: torch.bincount(flat, minlength=EXPERTS)[:EXPERTS],
    "histc": lambda self, flat: torch.histc(flat.float(), EXPERTS, 0, EXPERTS).long(),
    "scatter_add": lambda self, flat: torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(
        0, flat, torch.ones_like(flat)
    ),
}


class DrawnBlock(nn.Module):
    """Steps and experts, in the order drawn; weights are shared by all steps."""

    def __init__(self, names, forms, tally, top_k, group, positions):
        super().__init__()
        torch.manual_seed(0)
        for name in ("q", "k", "v", "up", "gate"):
            self.register_parameter(name, nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5))
        self.gain = nn.Parameter(torch.ones(WIDTH) * 1.125)
        self.shift = nn.Parameter(torch.arange(WIDTH) / WIDTH)
        self.to(DTYPE)
        self.register_buffer("table", torch.linspace(0.5, 1.5, positions).to(DTYPE))
        angles = torch.arange(positions)[:, None] / 10.0 ** torch.arange(0, 1, 2 / WIDTH)
        self.register_buffer("angles", torch.polar(torch.ones_like(angles), angles))
        layer = type("DrawnExperts", (Drawn,), {"forms": forms, "tally": TALLIES[tally]})
        self.moe = layer(WIDTH, HIDDEN, EXPERTS, top_k, group, DTYPE)
        self.names = names

    def forward(self, x):
        for name in self.names:
            if name == "experts":
                x = x + self.moe(x.flatten(0, 1)).view(x.shape)
            else:
                x = (APART | MIXED)[name](self, x)
        return x
