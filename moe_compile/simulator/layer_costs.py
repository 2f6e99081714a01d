"""Time of every operator of one MoE layer on one rank, for one micro-batch.

Contract
    Times are microseconds on one rank, the busiest where routing is imbalanced. `part` is the
    share of the micro-batch's rows, or of the local experts, that a chunk has.
    Byte counts are those of Megatron-style bf16 training; sources stand with each formula.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

from moe_compile.cost.hop_shape import HopShape
from moe_compile.cost.kernel_counts import CAUSAL_SHARE, ORDER_KERNELS, attention_operations
from moe_compile.hardware.cluster import ClusterProfile, Fit
from moe_compile.hardware.links import Link, leaving_share, spread_of
from moe_compile.simulator.kernels import Kernels
from moe_compile.simulator.method import (
    HOPS,
    AttentionSharding,
    Crossing,
    ExpertSharding,
    Method,
    Overlap,
    Products,
)
from moe_compile.simulator.models import ModelShape

BF16: Final = 2
"""Bytes of an element."""
FP8: Final = 1
"""Bytes of an element; its share of a scale, a thirty-second of a byte, is left out."""


class SentBytes(NamedTuple):
    """Bytes that leave a rank."""

    between: float
    """Bytes to other nodes."""
    within: float
    """Bytes to ranks of its node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """Rows, widths and experts one rank has, in elements, routing balanced; bytes that it sends.

    Bytes of rows are at the fit's imbalance: of the busiest rank. Masks and scores beside them are
    less than a hundredth of that.
    """

    model: ModelShape
    method: Method
    profile: ClusterProfile
    fit: Fit
    seq_len: int
    tokens: float
    """Tokens of the micro-batch in all ranks of a layer."""

    def of_part(self, part: float) -> Self:
        """Return the sizes for a share of the micro-batch, whole sequences."""
        return replace(self, tokens=self.tokens * part)

    @property
    def has_heads(self) -> bool:
        """Whether a rank has some heads of all tokens."""
        return self.method.attention is AttentionSharding.HEADS

    @property
    def has_slices(self) -> bool:
        """Whether a rank has a slice of every expert."""
        return self.method.experts is ExpertSharding.SLICES

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

    def row_bytes(self, element_bytes: float) -> float:
        """Return the bytes of a row, times the imbalance."""
        return self.model.width * element_bytes * self.imbalance

    def routed_bytes(self, element_bytes: float) -> float:
        """Return the bytes of a rank's tokens, once for each of their experts."""
        return self.local_tokens * self.model.top_k * self.row_bytes(element_bytes)

    def sent(self, element_bytes: float, part: float = 1.0) -> SentBytes:
        """Return the bytes that one all-to-all of `part` of the rows sends."""
        rows = self.routed_bytes(element_bytes) * part
        shape = self.method.hop_shape(self.model, self.profile)
        if shape is None:
            return SentBytes(0.0, rows * leaving_share(self.method.expert_ranks))
        if self.method.crossing is Crossing.BOTH_LINKS:
            return SentBytes(shape.across_bytes(rows), rows)
        spread = spread_of(self.method.expert_ranks, shape.num_local, is_gather=False)
        leaving = rows * leaving_share(self.method.expert_ranks)
        return SentBytes(leaving * spread.between, leaving * spread.within)

    def hopped(self, element_bytes: float) -> SentBytes:
        """Return the bytes that one exchange in two hops sends."""
        assert self.hops is not None
        rows = self.routed_bytes(element_bytes)
        return SentBytes(self.hops.across_bytes(rows), self.hops.inside_bytes(rows))

    @property
    def sent_per_layer(self) -> SentBytes:
        """Return the bytes that all-to-alls of a layer send, forward and backward, each once."""
        of_copies = self.hopped if self.hops else self.sent
        of_sums = self.hopped if self.hops and self.sums_in_hops else self.sent
        wires = self.method.dispatch_bytes, self.method.combine_bytes
        sent = [way(nbytes) for nbytes in wires for way in (of_copies, of_sums)]
        return SentBytes(sum(one.between for one in sent), sum(one.within for one in sent))

    @property
    def sums_in_hops(self) -> bool:
        """Whether rows that are added up travel in two hops too."""
        return self.method.crossing is Crossing.ROUNDED


ROUTER_KERNELS: Final = 12
"""Number of a router's small kernels: gate, softmax, top-k, histogram, sort, scan."""
PLACE_KERNELS: Final = 2.25
"""Kernels that exchange the routing of gathered tokens and find this rank's rows and their tokens,
less the kernels of the old form for its split sizes (passes/replay/gathered_routing.py)."""
PLACE_BYTES: Final = 8 * 12
"""Bytes read and written per row to find this rank's rows: a dozen int64, fused in kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts(LayerSizes):
    """Times of one layer's operators; see the module docstring."""

    @property
    def kernels(self) -> Kernels:
        """Return the kernel times of this machine."""
        products = self.method.products
        return Kernels(
            self.profile,
            self.fit,
            fp8=products is Products.ALL,
            grouped_fp8=products is not Products.BF16,
        )

    def before_attention_us(self) -> float:
        """All-gather of rows, or all-to-all of q, k and v; MegaScale-MoE eq. 1 and 2."""
        ranks, width = self.method.ranks, self.model.head_width + 2 * self.model.kv_width
        if self.has_heads:
            return self.kernels.gather_us(self.tokens * self.model.width * BF16, ranks)
        if self.method.attention is AttentionSharding.WHOLE:
            return 0.0
        return self.kernels.exchange_us(self.local_tokens * width * BF16, ranks)

    def after_attention_us(self) -> float:
        """Reduce-scatter of rows, or all-to-all of the output; MegaScale-MoE eq. 1 and 2."""
        ranks, sent = self.method.ranks, self.local_tokens * self.model.head_width * BF16
        if self.has_heads:
            return self.kernels.gather_us(self.tokens * self.model.width * BF16, ranks)
        return self.kernels.exchange_us(sent, ranks) if ranks > 1 else 0.0

    def dispatch_us(self, part: float = 1.0) -> float:
        """Rows to their experts; MegaScale-MoE eq. 3 and 4."""
        return self._rows_us(self.method.dispatch_bytes, part)

    def combine_us(self, part: float = 1.0) -> float:
        """Rows back from their experts; MegaScale-MoE eq. 3 and 4."""
        return self._rows_us(self.method.combine_bytes, part)

    def _rows_us(self, element_bytes: float, part: float) -> float:
        """Return the time of an exchange of rows in one collective."""
        kernels, ranks = self.kernels, self.method.expert_ranks
        if self.has_slices:
            gathered = self.tokens * self.row_bytes(element_bytes) * part
            return kernels.gather_us(gathered, self.method.ranks)
        if self.method.gathers_rows:
            gathered = self.local_tokens * ranks * self.row_bytes(element_bytes) * part
            return kernels.gather_us(gathered, ranks)
        sent = self.routed_bytes(element_bytes) * part
        if self.method.remote_nodes(self.model, self.profile):
            return kernels.far_exchange_us(*self.sent(element_bytes, part))
        slices = self.method.expert_slices
        return kernels.exchange_us(sent, ranks) + kernels.gather_us(slices * sent, slices)

    # compute, forward

    def qkv_us(self) -> float:
        """Query, key and value projections."""
        model = self.model
        return self.latent_share * self.kernels.gemm_us(
            self.attention_rows, self.qkv_columns, model.width
        )

    def output_us(self) -> float:
        """Output projection of attention."""
        model = self.model
        return self.latent_share * self.kernels.gemm_us(
            self.attention_rows, model.width, self.head_columns
        )

    def attention_us(self, *, is_backward: bool = False) -> float:
        """Causal attention."""
        operations = attention_operations(
            self.local_tokens,
            self.seq_len,
            2.0 * self.model.head_width,
            CAUSAL_SHARE,
            is_backward=is_backward,
        )
        return self.kernels.attention_us(operations, is_backward=is_backward)

    def norm_us(self) -> float:
        """One RMSNorm and a residual sum."""
        return self.kernels.memory_us(4 * self.rows_bytes, 2)

    def router_us(self) -> float:
        """Gate and bookkeeping of the routing."""
        return self.kernels.memory_us(3 * self.rows_bytes, ROUTER_KERNELS)

    def residual_us(self, passes: int = 3) -> float:
        """Sum of rows after the experts."""
        return self.kernels.memory_us(passes * self.rows_bytes)

    def permute_us(self, part: float = 1.0) -> float:
        """Rows sorted by expert, or back: read once, written once."""
        factor = self.fit.slow_operators if self.method.has_slow_operators else 1.0
        nbytes = 2 * self.routed_rows * self.model.width * BF16 * factor
        return self.kernels.memory_us(nbytes * part * self.imbalance)

    def first_experts_us(self, part: float = 1.0) -> float:
        """Gate and up projection of all experts of a rank, or of a chunk."""
        return self._grouped_us(part, 2 * self.expert_slice, self.model.width)

    def second_experts_us(self, part: float = 1.0) -> float:
        """Down projection of all experts of a rank, or of a chunk."""
        return self._grouped_us(part, self.model.width, self.expert_slice)

    def activation_us(self, part: float = 1.0, passes: int = 3) -> float:
        """SwiGLU: two reads and a write of routed rows forward, five passes backward."""
        nbytes = passes * self.routed_rows * self.expert_slice * BF16
        return self.kernels.memory_us(nbytes * part * self.imbalance)

    def shared_us(self) -> float:
        """Shared experts, on a rank's own tokens or a slice of them on all."""
        rows, width = self.shared_size
        kernels = self.kernels
        return kernels.gemm_us(rows, 2 * width, self.model.width) + kernels.gemm_us(
            rows, self.model.width, width
        )

    # compute, weight gradients

    def qkv_gradient_us(self) -> float:
        """Weight gradients of the query, key and value projections."""
        return self.latent_share * self._gradient_us(
            self.attention_rows, self.model.width, self.qkv_columns
        )

    def output_gradient_us(self) -> float:
        """Weight gradient of attention's output projection."""
        return self.latent_share * self._gradient_us(
            self.attention_rows, self.head_columns, self.model.width
        )

    def shared_gradient_us(self) -> float:
        """Weight gradients of the three matrices of the shared experts."""
        rows, width = self.shared_size
        return 3 * self._gradient_us(rows, self.model.width, width)

    def first_experts_gradient_us(self, part: float = 1.0) -> float:
        """Weight gradients of gate and up projection; `part` of the local experts."""
        return self._grouped_gradient_us(part, self.model.width, 2 * self.expert_slice)

    def second_experts_gradient_us(self, part: float = 1.0) -> float:
        """Weight gradient of the down projection; `part` of the local experts."""
        return self._grouped_gradient_us(part, self.expert_slice, self.model.width)

    # operators that products of experts in fp8 add; rows are quantised where they are made

    def arrived_us(self, part: float = 1.0) -> float:
        """Rows that came for the first products, sorted by expert, and quantised unless they are.

        Rows in fp8 are sorted as they came: half the bytes.
        """
        if self.method.quantises and self.is_fed:
            return self._moved_us(2 * FP8, self.model.width, part)
        return self.permute_us(part) + self._quantised_us(self.model.width, part)

    def arrived_gradient_us(self, part: float = 1.0) -> float:
        """Gradients that came for the second products; those of weights need them in bf16 too."""
        if self.method.quantises and self.method.combine_bytes == FP8:
            return self.permute_us(part) + self._moved_us(2 * FP8, self.model.width, part)
        return self.permute_us(part) + self._quantised_us(self.model.width, part)

    def quantised_hidden_us(self, part: float = 1.0) -> float:
        """Rows between the first and the second products, quantised: the bytes it writes more."""
        return self._quantised_us(self.expert_slice, part)

    def quantised_gradient_us(self, part: float = 1.0) -> float:
        """Gradients of the results of gate and up projection, quantised, likewise."""
        return self._quantised_us(2 * self.expert_slice, part)

    def transposed_weights_us(self) -> float:
        """Gate, up and down projection of all experts of a rank, in fp8, copied for the backward.

        The forward reads them as they were gathered: `step` counts that they are quantised.
        """
        if not self.method.quantises:
            return 0.0
        weights = 3 * self.local_experts * self.model.width * self.expert_slice
        return self.kernels.memory_us(2 * FP8 * weights, 3)

    def unpacked_us(self, part: float = 1.0) -> float:
        """Rows for gradients of weights, from the message that was kept in place of them."""
        if not (self.method.quantises and self.is_fed) or self.method.rebuilds:
            return 0.0
        return self._moved_us(BF16 + FP8, self.model.width, part)

    @property
    def is_fed(self) -> bool:
        """Whether rows come in fp8."""
        return self.method.dispatch_bytes == FP8

    def _quantised_us(self, columns: float, part: float) -> float:
        return self._moved_us(FP8, columns, part, kernels=0) if self.method.quantises else 0.0

    def _moved_us(
        self, element_bytes: float, columns: float, part: float, kernels: int = 1
    ) -> float:
        """Return the time to move so many bytes per element of routed rows."""
        nbytes = element_bytes * self.routed_rows * columns
        return self.kernels.memory_us(nbytes * part * self.imbalance, kernels)

    # operators that a rewrite into chunks adds

    def order_us(self) -> float:
        """Small kernels that find each row's place by chunk; kernels beside them move the rows."""
        return self.kernels.memory_us(0.0, ORDER_KERNELS)

    def place_us(self) -> float:
        """Small kernels that read the numbers of gathered rows and find a rank's own."""
        if not (self.method.gathers_rows and self.method.sums_gathered):
            return 0.0
        return self.kernels.memory_us(self.routed_rows * PLACE_BYTES, PLACE_KERNELS)

    def wide_sums_us(self, part: float = 1.0) -> float:
        """Sums for the tokens of all other ranks too: zeros, which rows are then added to."""
        if not (self.method.gathers_rows and self.method.sums_gathered):
            return 0.0
        others = self.method.expert_ranks - 1
        return self.kernels.memory_us(3 * others * self.rows_bytes * part, 2)

    def joined_gradient_us(self) -> float:
        """Gradients of the chunks' slices of gate, up and down projection: read once, written."""
        weights = 3 * self.local_experts * self.model.width * self.expert_slice
        return self.kernels.memory_us(2 * weights * BF16, 3)

    # shapes into kernels

    def _grouped_us(self, part: float, columns: float, reduction: float) -> float:
        by_tokens = self.method.chunks_tokens
        groups = self.local_experts * (1.0 if by_tokens else part)
        rows = self.expert_rows * (part if by_tokens else 1.0)
        return self.kernels.grouped_us(groups, rows, columns, reduction) * self.imbalance

    def _gradient_us(self, rows: float, left: float, right: float) -> float:
        return self.kernels.gradient_us(rows, left, right, self.method.gradient_sum_bytes)

    def _grouped_gradient_us(self, part: float, left: float, right: float) -> float:
        groups = self.local_experts * part
        sum_bytes = self.method.gradient_sum_bytes
        us = self.kernels.grouped_gradient_us(groups, self.expert_rows, left, right, sum_bytes)
        return us * self.imbalance
