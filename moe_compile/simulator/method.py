"""How a training system runs a model: what is divided, what overlaps, what travels."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from moe_compile.errors import InvalidConfig
from moe_compile.hardware.cluster import ClusterProfile
from moe_compile.simulator.models import ModelShape


class Overlap(enum.Enum):
    """What runs beside what."""

    SEQUENTIAL = "sequential"
    """One kernel after another."""
    INTER_OP = "inter-op"
    """Whole operators: collectives beside whatever does not depend on them."""
    CHUNKS = "chunks"
    """Inter-op, and the MoE region in chunks of experts or tokens."""
    TILES = "tiles"
    """Each collective inside the kernel beside it: what hand-written fused kernels reach."""
    HALVES = "halves"
    """Inter-op between two halves of the micro-batch."""
    TWO_BATCHES = "two-batches"
    """Inter-op between the forward of one micro-batch and the backward of another."""
    IDEAL = "ideal"
    """Collectives take no time: the bound of every overlap."""


class Attention(enum.Enum):
    """What of attention each rank of a layer has."""

    HEADS = "heads"
    """Tensor parallelism: all-gather before, reduce-scatter after."""
    SEQUENCE = "sequence"
    """Ulysses: all weights on every rank, an all-to-all before and one after."""
    WHOLE = "whole"
    """Data parallelism: a micro-batch per rank, no collective."""


class Experts(enum.Enum):
    """What of the experts each rank of a layer has."""

    SOME = "some"
    """Expert parallelism."""
    SLICES = "slices"
    """Tensor parallelism: a slice of every expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """What a training system does with one layer."""

    attention: Attention = Attention.SEQUENCE
    experts: Experts = Experts.SOME
    ranks: int = 8
    """That share the tokens of one micro-batch; 1 with `Attention.WHOLE`."""
    expert_ranks: int = 8
    """That share the experts."""
    expert_slices: int = 1
    """Ranks that share each expert beside that; gathers and scatters rows among them."""
    gathers_rows: bool = False
    """Whether rows go to experts by all-gather and back by reduce-scatter."""
    sends_flat: bool = False
    """Whether between nodes a row crosses once per expert it goes to, as a plain all-to-all sends
    it; else once per node it goes to, and fans out there."""
    overlap: Overlap = Overlap.SEQUENTIAL
    num_chunks: int = 1
    """Of the MoE region, with `Overlap.CHUNKS`."""
    chunks_tokens: bool = False
    """Whether chunks are of tokens, else of experts."""
    replays_chunks: bool = False
    """Whether operators of their own find the rows of chunks and join slices of weight gradients,
    as the compiler's rewrite does; else kernels find their chunk in place."""
    sums_gathered: bool = False
    """Whether gathered rows are picked from and added to a tensor of all ranks' tokens by operators
    of their own, as the compiler's rewrite does; else kernels beside it do so in passing."""
    dispatch_bytes: float = 2.0
    """Of one element on the way to the experts."""
    combine_bytes: float = 2.0
    fp8_gemms: bool = False
    """Forward and input gradients; weight gradients stay bf16."""
    rebuilds: bool = False
    """Selective rematerialization: dispatched rows and activations are made again in backward."""
    fuses_gradient_sum: bool = True
    """Whether a weight's gradient is added to fp32 in its GEMM: 8 bytes per weight, else 12."""
    has_slow_operators: bool = False
    """Whether rows are permuted as the fitted baseline does it."""

    def __post_init__(self) -> None:
        """Raise InvalidConfig for numbers that cannot be."""
        for name in ("ranks", "expert_ranks", "expert_slices", "num_chunks"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; write 1 or more")
        if self.overlap is Overlap.CHUNKS and self.num_chunks == 1:
            raise InvalidConfig("chunks: num_chunks is 1; write 2 or more")

    @property
    def gradient_sum_bytes(self) -> int:
        """Return the bytes moved per weight to add one micro-batch's gradient."""
        return 8 if self.fuses_gradient_sum else 12

    def check(self, model: ModelShape) -> None:
        """Raise InvalidConfig when `model` cannot be divided so."""
        if self.experts is Experts.SOME and model.num_experts % self.expert_ranks:
            raise InvalidConfig(
                f"{model.name} has {model.num_experts} experts; {self.expert_ranks} ranks "
                "cannot share them evenly"
            )
        if self.overlap is Overlap.CHUNKS and not self.chunks_tokens:
            local = model.num_experts // self.expert_ranks
            if self.num_chunks > local:
                raise InvalidConfig(
                    f"{self.num_chunks} chunks of experts, but a rank has {local}; chunk by tokens"
                )

    def remote_nodes(self, model: ModelShape, profile: ClusterProfile) -> float:
        """Return how many other nodes a token's rows go to, at balanced routing.

        `top_k` experts drawn evenly from n nodes lie on n * (1 - (1 - 1/n)^k) of them; a limit on
        nodes caps that; one in n is the token's own.
        """
        nodes = math.ceil(self.expert_ranks / profile.nvlink.num_ranks)
        if self.experts is Experts.SLICES or nodes <= 1:
            return 0.0
        hit = nodes * (1.0 - (1.0 - 1.0 / nodes) ** model.top_k)
        if model.max_nodes:
            hit = min(hit, float(model.max_nodes))
        return hit * (nodes - 1) / nodes
