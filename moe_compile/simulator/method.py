"""A training system's way to run a model: sharding, overlap, number formats."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

from moe_compile.cost.hop_shape import HopShape
from moe_compile.errors import InvalidConfig
from moe_compile.hardware.cluster import ClusterProfile
from moe_compile.simulator.models import ModelShape


class Overlap(enum.Enum):
    """The pairs of tasks that may run at the same time."""

    SEQUENTIAL = "sequential"
    """One kernel after another."""
    INTER_OP = "inter-op"
    """Whole operators: collectives beside operators that do not depend on them."""
    CHUNKS = "chunks"
    """Inter-op, and the MoE region in chunks of experts or tokens."""
    TILES = "tiles"
    """Each collective inside the kernel beside it, as in hand-written fused kernels."""
    TWO_BATCHES = "two-batches"
    """Inter-op between the forward of one micro-batch and the backward of another."""
    IDEAL = "ideal"
    """Collectives take no time: the bound of every overlap."""


class AttentionSharding(enum.Enum):
    """The part of attention on each rank of a layer."""

    HEADS = "heads"
    """Tensor parallelism: all-gather before, reduce-scatter after."""
    SEQUENCE = "sequence"
    """Ulysses: all weights on every rank, an all-to-all before and one after."""
    WHOLE = "whole"
    """Data parallelism: a micro-batch per rank, no collective."""


class ExpertSharding(enum.Enum):
    """The part of the experts on each rank of a layer."""

    SOME = "some"
    """Expert parallelism: some whole experts."""
    SLICES = "slices"
    """Tensor parallelism: a slice of every expert."""


class Crossing(enum.Enum):
    """How rows go to experts on other nodes and back."""

    FLAT = "flat"
    """A plain all-to-all: a row crosses once for each expert it goes to."""
    BOTH_LINKS = "both links"
    """A row crosses once for each node it goes to, and fans out there meanwhile: kernels that use
    both links at once, as DeepSeek-V3's and DeepEP."""
    EXACT = "exact"
    """Rows in two hops, one collective between nodes and one inside them; sums flat: `nodes` of
    the compiler."""
    ROUNDED = "rounded"
    """Rows and sums in two hops."""


class Products(enum.Enum):
    """The matrix products in fp8. Gradients of weights stay bf16."""

    BF16 = "bf16"
    """None."""
    EXPERTS = "fp8"
    """Products of routed experts, and those that make gradients of their rows: `expert_compute` of
    the compiler. Kernels quantise rows; rows that come in fp8 feed a product so. Weights are
    quantised before FSDP2 gathers them, once for all micro-batches of a step."""
    EXPERTS_FREE = "fp8-free"
    """The same products if nothing had to be quantised: the bound of `EXPERTS`."""
    ALL = "fp8-all"
    """Those of attention and shared experts too, if nothing had to be quantised: a bound."""


HOPS: Final = (Crossing.EXACT, Crossing.ROUNDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A training system's method for one layer."""

    attention: AttentionSharding = AttentionSharding.SEQUENCE
    experts: ExpertSharding = ExpertSharding.SOME
    ranks: int = 8
    """Ranks that share the tokens of one micro-batch; 1 with `AttentionSharding.WHOLE`."""
    expert_ranks: int = 8
    """Ranks that share the experts."""
    expert_slices: int = 1
    """Ranks that also share each expert; each gathers and scatters rows among them."""
    gathers_rows: bool = False
    """Whether rows go to experts by all-gather and back by reduce-scatter."""
    crossing: Crossing = Crossing.BOTH_LINKS
    """How rows cross where the ranks that share the experts are on several nodes."""
    overlap: Overlap = Overlap.SEQUENTIAL
    num_chunks: int = 1
    """Chunks of the MoE region, with `Overlap.CHUNKS`."""
    chunks_tokens: bool = False
    """Whether chunks are of tokens; if not, of experts. In two hops chunks of experts are those of
    hop 2, those of tokens slices of both hops, for whose rows experts wait."""
    batch_parts: int = 1
    """Parts of the micro-batch, whole sequences, of which one computes while another travels."""
    blocks_per_graph: int = 1
    """Layers whose forward, or backward, is scheduled as one."""
    replays_chunks: bool = False
    """Whether operators of their own find the rows of chunks and join slices of weight gradients,
    as the compiler's rewrite does; if not, kernels find their chunk in place."""
    sums_gathered: bool = False
    """Whether gathered rows are picked from and added to a tensor of all ranks' tokens by operators
    of their own, as the compiler's rewrite does; if not, kernels beside it do so in passing."""
    dispatch_bytes: float = 2.0
    """Bytes of one element on the way to the experts."""
    combine_bytes: float = 2.0
    products: Products = Products.BF16
    rebuilds: bool = False
    """Whether backward recomputes dispatched rows and activations (selective rematerialization)."""
    fuses_gradient_sum: bool = True
    """Whether a weight's gradient is added to fp32 in its GEMM: 8 bytes per weight, not 12."""
    has_slow_operators: bool = False
    """Whether rows are permuted as slowly as in the fitted baseline."""

    def __post_init__(self) -> None:
        """Raise InvalidConfig for impossible numbers."""
        counts = ("ranks", "expert_ranks", "expert_slices", "num_chunks", "batch_parts")
        for name in (*counts, "blocks_per_graph"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; write 1 or more")
        if self.overlap is Overlap.CHUNKS and self.num_chunks == 1:
            raise InvalidConfig(
                "a schedule in chunks needs num_chunks of 2 or more, and num_chunks is 1"
            )
        if self.crossing in HOPS and self._has_no_hops:
            raise InvalidConfig(
                f"{self.crossing.value}: two hops need experts that are not sliced, and "
                "all-to-alls in separate kernels; this schedule has others"
            )

    @property
    def _has_no_hops(self) -> bool:
        sends_no_rows = self.gathers_rows or self.experts is ExpertSharding.SLICES
        return sends_no_rows or self.expert_slices > 1 or self.overlap is Overlap.TILES

    @property
    def quantises(self) -> bool:
        """Whether kernels quantise what products of experts multiply."""
        return self.products is Products.EXPERTS

    @property
    def gradient_sum_bytes(self) -> int:
        """Return the bytes moved per weight to add one micro-batch's gradient."""
        return 8 if self.fuses_gradient_sum else 12

    def check(self, model: ModelShape) -> None:
        """Raise InvalidConfig when the method cannot divide `model`."""
        if self.experts is ExpertSharding.SOME and model.num_experts % self.expert_ranks:
            raise InvalidConfig(
                f"{model.name} has {model.num_experts} experts; {self.expert_ranks} ranks "
                "cannot share them evenly"
            )
        if self.overlap is Overlap.CHUNKS and not self.chunks_tokens:
            local = model.num_experts // self.expert_ranks
            if self.num_chunks > local:
                raise InvalidConfig(
                    f"{self.num_chunks} chunks of experts need as many experts on a rank, and a "
                    f"rank has {local}; chunk by tokens"
                )

    def hop_shape(self, model: ModelShape, profile: ClusterProfile) -> HopShape | None:
        """Return how a token's rows spread over nodes; None where they stay in one."""
        num_local = profile.nvlink.num_ranks
        nodes = math.ceil(self.expert_ranks / num_local)
        if self.experts is ExpertSharding.SLICES or nodes <= 1:
            return None
        return HopShape(
            num_nodes=nodes,
            num_local=num_local,
            num_experts=model.num_experts,
            rows_per_token=model.top_k,
            row_bytes=model.width * self.dispatch_bytes,
            max_nodes=model.max_nodes,
        )

    def remote_nodes(self, model: ModelShape, profile: ClusterProfile) -> float:
        """Return how many other nodes a token's rows go to, at balanced routing."""
        shape = self.hop_shape(model, profile)
        return shape.hop_rows if shape is not None else 0.0
