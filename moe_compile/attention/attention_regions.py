"""An attention region: attention and the exchanges around it, with facts for the passes.

Contract
    A region names nodes of one graph and is stale once that graph is edited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch.fx as fx

from moe_compile.dims.factors import Factor
from moe_compile.dims.tracker import Tracker
from moe_compile.journal.reasons import Reason
from moe_compile.proof.kernel_bits import HeadBits

UNPROVEN: Final = frozenset(
    {
        Reason.HEADS_LOST,
        Reason.VARIES_BY_HEAD,
        Reason.RANDOM,
        Reason.ESCAPES,
        Reason.MUTATED_MEANWHILE,
        Reason.STATE_CHANGES,
        Reason.GRADIENT_ORDER,
        Reason.GRADIENT_BESIDE,
    }
)
"""Refusals of attention with even exchanges on both sides that is not proven by groups of heads.
All others say that there is no region, or that nothing is to be split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRegion:
    """Attention between an exchange of heads for sequence and the exchange back."""

    name: str
    """Name of the attention node."""
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
    """Movements of data from the exchanges to the attention, both excluded, in graph order."""
    outward: tuple[fx.Node, ...]
    """Movements of the result, from after the attention to the last wait, in graph order."""
    cut: tuple[fx.Node, ...]
    """Inputs of the body that have heads: tensors sent, operands that no exchange brings, and
    tensors joined to either."""
    tracker: Tracker
    head: Factor | None
    """The factor that is the index of KV heads of this rank; None when there is one head."""
    num_heads: int
    """Query heads of this rank."""
    num_kv_heads: int
    """KV heads of this rank, repetitions not counted where they are known."""
    rounds: bool
    """Whether groups of any number may differ from the whole in the last bits."""
    rounds_alone: bool
    """Whether groups of one query head may."""
    last_bits: HeadBits
    """Notes on last bits for the report, which decide nothing."""
    group: str
    num_ranks: int

    @property
    def result(self) -> fx.Node:
        """The last wait of the exchange back."""
        return self.outward[-1]

    def may_round(self, num_groups: int) -> bool:
        """Whether `num_groups` groups may differ from the whole in the last bits."""
        alone = self.num_heads == num_groups and self.rounds_alone
        return num_groups > 1 and (self.rounds or alone)

    def why_last_bits(self, num_groups: int) -> str:
        """Return why last bits may depend on where heads lie in memory, or ""."""
        alone = self.last_bits.alone if self.num_heads == num_groups else ""
        return (self.last_bits.groups or alone) if num_groups > 1 else ""

    @property
    def body(self) -> tuple[fx.Node, ...]:
        """All nodes that are replayed for a group of heads, in the order they run."""
        return (*self.exchanges, *self.inward, self.core, *self.outward)

    @property
    def launches(self) -> tuple[fx.Node, ...]:
        """Every exchange of the region."""
        back = [node for node in self.outward if node in self.tracker.sent]
        return (*self.exchanges, *back)
