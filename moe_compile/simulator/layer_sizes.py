"""Rows, widths and experts one rank has of one MoE layer, for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

from moe_compile.cost.hop_shape import HopShape
from moe_compile.hardware.cluster import ClusterProfile, Fit
from moe_compile.hardware.links import Link
from moe_compile.simulator.method import HOPS, Attention, Experts, Method, Overlap
from moe_compile.simulator.models import ModelShape

BF16: Final = 2
"""Bytes of an element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """See the module docstring; sizes in elements, routing balanced."""

    model: ModelShape
    method: Method
    profile: ClusterProfile
    fit: Fit
    seq_len: int
    tokens: float
    """Of the micro-batch in the ranks of a layer together."""

    def of_part(self, part: float) -> Self:
        """Return the same for a share of the micro-batch, whole sequences."""
        return replace(self, tokens=self.tokens * part)

    @property
    def has_heads(self) -> bool:
        """Whether a rank has some heads of all tokens."""
        return self.method.attention is Attention.HEADS

    @property
    def has_slices(self) -> bool:
        """Whether a rank has a slice of every expert."""
        return self.method.experts is Experts.SLICES

    @property
    def local_tokens(self) -> float:
        """Return the tokens a rank has outside tensor-parallel regions."""
        return self.tokens / self.method.ranks

    @property
    def attention_rows(self) -> float:
        """Return the rows of a rank's attention projections."""
        return self.tokens if self.has_heads else self.local_tokens

    @property
    def attention_slices(self) -> int:
        """Return the ranks that share each attention projection."""
        return self.method.ranks if self.has_heads else 1

    @property
    def local_experts(self) -> float:
        """Return the experts a rank has."""
        model = self.model
        return model.num_experts / (1 if self.has_slices else self.method.expert_ranks)

    @property
    def expert_rows(self) -> float:
        """Return the rows of one expert on its rank, routing balanced."""
        sharing = self.method.ranks if self.has_slices else self.method.expert_ranks
        rows = self.local_tokens * sharing * self.model.top_k / self.model.num_experts
        return rows * self.method.expert_slices

    @property
    def routed_rows(self) -> float:
        """Return the rows of all a rank's experts, routing balanced."""
        return self.expert_rows * self.local_experts

    @property
    def expert_slice(self) -> float:
        """Return the width of one expert on a rank."""
        sharing = self.method.ranks if self.has_slices else self.method.expert_slices
        return self.model.expert_width / sharing

    @property
    def imbalance(self) -> float:
        """Return the rows of the busiest rank over the mean; slices are always balanced."""
        return 1.0 if self.has_slices else self.fit.imbalance

    @property
    def latent_share(self) -> float:
        """Return the weights of attention over those its heads suggest."""
        return self.model.layer_attention_weights / self.model.plain_attention_weights

    @property
    def qkv_columns(self) -> float:
        """Return the columns of a rank's query, key and value projections."""
        return (self.model.head_width + 2 * self.model.kv_width) / self.attention_slices

    @property
    def head_columns(self) -> float:
        """Return the rows of a rank's output projection."""
        return self.model.head_width / self.attention_slices

    @property
    def link(self) -> Link:
        """Return the link by whose numbers compute and collectives slow each other."""
        is_far = self.method.remote_nodes(self.model, self.profile) > 0.0
        return self.profile.network if is_far else self.profile.nvlink

    @property
    def hops(self) -> HopShape | None:
        """Return the shape of the two hops in which rows travel; None where they go in one.

        Free collectives need none: the bound of every way is one bound.
        """
        method = self.method
        if method.crossing not in HOPS or method.overlap is Overlap.IDEAL:
            return None
        return method.hop_shape(self.model, self.profile)

    @property
    def rows_bytes(self) -> float:
        """Return the bytes of a rank's activations `[local tokens, width]`."""
        return self.local_tokens * self.model.width * BF16

    @property
    def shared_size(self) -> tuple[float, float]:
        """Return rows and width of the shared experts on a rank."""
        width = self.model.expert_width * self.model.num_shared
        if self.has_slices:
            return self.tokens, width / self.method.ranks
        return self.local_tokens, width
