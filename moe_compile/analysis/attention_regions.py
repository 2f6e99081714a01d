"""An attention region: what the passes know of attention and the exchanges around it.

Contract
    A region names nodes of one graph and is stale once that graph is edited.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import torch.fx as fx

from moe_compile.analysis.head_factors import Factor
from moe_compile.analysis.head_rounding import rounds_alone
from moe_compile.analysis.head_tracking import Tracker


class AttentionRefusal(enum.Enum):
    """Why an attention operator is left as it is. Values are what reports print."""

    NO_EXCHANGE = "no exchange around it"
    TENSOR_PARALLEL = "its heads are sharded by tensor parallelism: gathered before, reduced after"
    COMPUTED_BETWEEN = "an operator between the exchange and attention is no movement of data"
    SEVERAL_EXCHANGES = "an operand is exchanged more than once"
    GROUPS_DIFFER = "its exchanges are over different groups"
    UNEVEN = "an exchange around it is not even"
    NOT_HEADS = "the exchange does not send heads away"
    NOT_SEQUENCE = "the exchange does not gather the sequence"
    NO_EXCHANGE_BACK = "no even exchange of its result alone, by movement of data only, follows"
    NOT_BACK = "the exchange back does not split the sequence that was gathered"
    HEADS_LOST = "the index of the heads cannot be followed"
    VARIES_BY_HEAD = "its mask varies by head"
    RANDOM = "its dropout draws random numbers"
    ESCAPES = "a value inside the region is read outside it"
    MUTATED_MEANWHILE = "a tensor the region reads is written inside it"
    STATE_CHANGES = "grad mode or autocast changes inside the region"
    GRADIENT_ORDER = (
        "a tensor it reads is read by others meanwhile: its gradient would be summed in another "
        "order"
    )
    GRADIENT_BESIDE = (
        "a gradient flows into what heads share or no exchange brings: groups would round it "
        "otherwise"
    )
    ONE_GROUP = "one group of heads asked for"
    BY_PRICE = "left in one group by the planner"
    MAY_ROUND = (
        "torch's kernel or the gradient of what no exchange brings may round otherwise by group: "
        "ask for a number"
    )
    ONE_KV_HEAD = "one local KV head: nothing to split by"
    NOT_DIVISIBLE = "attention_chunks does not divide the local KV heads"


UNPROVEN: Final = frozenset(
    {
        AttentionRefusal.HEADS_LOST,
        AttentionRefusal.VARIES_BY_HEAD,
        AttentionRefusal.RANDOM,
        AttentionRefusal.ESCAPES,
        AttentionRefusal.MUTATED_MEANWHILE,
        AttentionRefusal.STATE_CHANGES,
        AttentionRefusal.GRADIENT_ORDER,
        AttentionRefusal.GRADIENT_BESIDE,
    }
)
"""Reasons of attention with even exchanges on both sides that groups of heads may not be right for.
All others say that there is no region, or that nothing is to be split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRegion:
    """Attention between an exchange of heads for sequence and the exchange back."""

    name: str
    """Of the attention node."""
    core: fx.Node
    """The attention operator."""
    operands: tuple[fx.Node, ...]
    """Query, key and value."""
    sources: tuple[fx.Node | None, ...]
    """The launch that brings each operand; None for one that is computed here, as from a gathered
    latent."""
    exchanges: tuple[fx.Node, ...]
    """Launches that bring operands, in graph order: one each, or one for all."""
    inward: tuple[fx.Node, ...]
    """What moves data from the exchanges to the attention, both excluded, in graph order."""
    outward: tuple[fx.Node, ...]
    """What moves the result, from after the attention to the last wait, in graph order."""
    cut: tuple[fx.Node, ...]
    """What the body reads that has heads: what is sent, operands that no exchange brings, and what
    is joined to either."""
    state_calls: tuple[fx.Node, ...]
    """Selections of a backend that the attention stands between."""
    tracker: Tracker
    head: Factor | None
    """The factor that is the index of KV heads of this rank; None when there is one head."""
    num_heads: int
    """Query heads of this rank."""
    num_kv_heads: int
    """Those of this rank, repetitions not counted where they can be told."""
    rounds: bool
    """Whether groups of any number may differ from the whole in the last bits."""
    group: str
    num_ranks: int

    @property
    def result(self) -> fx.Node:
        """The last wait of the exchange back."""
        return self.outward[-1]

    def may_round(self, num_groups: int) -> bool:
        """Whether `num_groups` groups may differ from the whole in the last bits."""
        alone = self.num_heads == num_groups and rounds_alone(self.operands)
        return num_groups > 1 and (self.rounds or alone)

    @property
    def local_operands(self) -> tuple[fx.Node, ...]:
        """Operands that no exchange brings."""
        pairs = zip(self.operands, self.sources, strict=True)
        return tuple(dict.fromkeys(operand for operand, source in pairs if source is None))

    @property
    def body(self) -> tuple[fx.Node, ...]:
        """All that is replayed for a group of heads, in the order it runs."""
        return (*self.exchanges, *self.inward, self.core, *self.outward)

    @property
    def launches(self) -> tuple[fx.Node, ...]:
        """Every exchange of the region."""
        back = [node for node in self.outward if node in self.tracker.sent]
        return (*self.exchanges, *back)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRefused:
    """An attention operator left alone, and why."""

    name: str
    core: fx.Node
    reason: AttentionRefusal
    detail: str = ""
    groups: tuple[str, ...] = ()
    """Under tensor parallelism: the groups that gather before it and reduce after it."""
