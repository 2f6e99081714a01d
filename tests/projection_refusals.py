"""Attention regions with a projection that groups of heads cannot compute apart, and why."""

import torch
from torch import nn

from moe_compile.journal.reasons import Reason
from tests.attention_layers import NormOverHeads, ReadProjection, SplitAttention, to_positions

QKV, OUT = "projections of q, k and v whole: ", "output projection whole: "


class NoProjection(SplitAttention):
    """q, k and v are the input itself, scaled."""

    def project(self, x):
        heads = x.repeat_interleave(12, -1).unflatten(-1, (self.heads, self.d)).transpose(1, 2)
        return heads * 0.5, heads * 0.25, heads * 2.0


class LateWeight(SplitAttention):
    """The weight of the output is made after the attention."""

    def output(self, o):
        return nn.functional.linear(o.transpose(1, 2).flatten(2), self.wo.weight * 0.5)


class ProjectedUnderAutocast(SplitAttention):
    """The projections of q, k and v alone run under autocast."""

    def project(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().project(x)


class OutputUnderAutocast(SplitAttention):
    """The output projection alone runs under autocast."""

    def output(self, o):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().output(o)


class WrittenInput(SplitAttention):
    """The input of the projections is written before the attention."""

    def forward(self, x):
        x = x * 1.0
        q, k, v = self.project(x)
        x.add_(1.0)
        o = self.attend(*self.exchange(q, k, v))
        return self.output(to_positions(o, self.group)) + x


class OutputByHead(SplitAttention):
    """Every head has the same small output projection."""

    def __init__(self, *sizes_and_group, **settings):
        super().__init__(*sizes_and_group, **settings)
        self.small = nn.Linear(self.d, self.d)

    def output(self, o):
        return self.wo(self.small(o).transpose(1, 2).flatten(2))


class BesideQueries(SplitAttention):
    """The output projection reads the queries too, beside the result."""

    def __init__(self, width, heads, kv_heads, head_width, group, **settings):
        super().__init__(width, heads, kv_heads, head_width, group, **settings)
        self.wo = nn.Linear(2 * heads * head_width, width, bias=False)

    def forward(self, x):
        q, k, v = self.project(x)
        o = to_positions(self.attend(*self.exchange(q, k, v)), self.group)
        return self.output(torch.cat([o, q], -1))


REFUSED = {
    NoProjection: (QKV + Reason.NO_PROJECTION.value,),
    NormOverHeads: (QKV + Reason.MIXES_HEADS.value,),
    ReadProjection: (
        QKV + Reason.ESCAPES.value,
        OUT + Reason.NO_OUTPUT.value,
    ),
    LateWeight: (OUT + Reason.MADE_LATE.value,),
    ProjectedUnderAutocast: (QKV + Reason.STATE_CHANGES.value,),
    OutputUnderAutocast: (OUT + Reason.STATE_CHANGES.value,),
    WrittenInput: (QKV + Reason.MUTATED_MEANWHILE.value,),
    BesideQueries: (
        QKV + Reason.ESCAPES.value,
        OUT + Reason.NO_OUTPUT.value,
    ),
    OutputByHead: (OUT + Reason.HEADS_LOST.value,),
}
"""Program -> what the report says, but for names, when both projections are asked to be split."""
