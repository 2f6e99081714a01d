"""Hypothesis strategies over shapes, routings, chunks and dtypes that an MoE layer must handle.

Contract
    Every drawn case is legal for the number of ranks it was drawn for.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from moe_compile.proof.kernel_bits import BLOCK_BYTES
from moe_compile.testing.cpu_rounding.position_rounding import ALIGNED_BYTES


class RoutingPattern(enum.Enum):
    """Patterns by which the tokens of all ranks choose experts."""

    BALANCED = "whatever random scores choose"
    SKEWED = "one expert is chosen by every token"
    ONE_EXPERT = "top_k experts take everything"
    FIRST_RANK = "only experts of rank 0 get rows; the other ranks receive none"


@dataclass(frozen=True, kw_only=True, slots=True)
class MoECase:
    """One layer and the steps it runs."""

    num_ranks: int
    width: int
    """Model width D, a multiple of 8: grouped GEMMs want rows of 16 bytes; in four or eight bytes
    one that fills 64 bytes, so that a CPU rounds products alike in every row."""
    hidden: int
    """Width of an expert, a multiple of 8; in four or eight bytes one that fills 128 bytes, so
    that a CPU rounds activations alike as well."""
    num_experts: int
    top_k: int
    chunks: int
    dtype: torch.dtype
    routing: RoutingPattern
    tokens: tuple[tuple[int, ...], ...]
    """Tokens per step and rank: `tokens[step][rank]`."""
    seed: int


@st.composite
def moe_cases(
    draw: st.DrawFn, num_ranks: int, dtypes: Sequence[torch.dtype] = (torch.bfloat16,)
) -> MoECase:
    """Draw a case for `num_ranks` ranks."""
    local = draw(st.integers(1, 5), label="local experts")
    num_experts = local * num_ranks
    dtype = draw(st.sampled_from(list(dtypes)), label="dtype")
    step = st.one_of(
        st.integers(1, 24).map(lambda t: (t,) * num_ranks),
        st.tuples(*[st.integers(1, 24)] * num_ranks),
    )
    return MoECase(
        num_ranks=num_ranks,
        width=_unit(dtype, ALIGNED_BYTES) * draw(st.integers(1, 3), label="width / unit"),
        hidden=_unit(dtype, BLOCK_BYTES) * draw(st.integers(1, 3), label="hidden / unit"),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(3, num_experts)), label="top_k"),
        chunks=draw(st.integers(1, local + 1), label="chunks"),
        dtype=dtype,
        routing=draw(st.sampled_from(list(RoutingPattern)), label="routing"),
        tokens=tuple(draw(st.lists(step, min_size=1, max_size=3), label="tokens")),
        seed=draw(st.integers(0, 2**16), label="seed"),
    )


def _unit(dtype: torch.dtype, num_bytes: int) -> int:
    return 8 if dtype.itemsize == 2 else num_bytes // dtype.itemsize


def chosen_experts(case: MoECase) -> tuple[int, ...]:
    """Return the experts every token must choose, best first; () when scores decide.

    `SKEWED` fixes the first choice only.
    """
    local = case.num_experts // case.num_ranks
    if case.routing is RoutingPattern.BALANCED:
        return ()
    if case.routing is RoutingPattern.SKEWED:
        return (case.seed % case.num_experts,)
    if case.routing is RoutingPattern.FIRST_RANK and local >= case.top_k:
        return tuple(range(case.top_k))
    return tuple((case.seed + i) % case.num_experts for i in range(case.top_k))
