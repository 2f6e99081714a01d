"""How many chunks a region runs in, and how many groups of heads attention.

Contract
    A function of the options and of static facts of the region: the same on every rank.
"""

from __future__ import annotations

import enum
from typing import Final

from moe_compile.analysis.attention_regions import AttentionRefusal, AttentionRegion
from moe_compile.analysis.regions import MoERegion
from moe_compile.analysis.token_regions import TokenRows
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import known_rows
from moe_compile.planning.choose_plan import Decision

AUTO_CHUNKS: Final = 2
"""What "auto" asks for where nothing can be priced: one exchange always runs beside compute."""


class Remark(enum.Enum):
    """What to know of a region's chunks: not the number asked for, one alone, or other values."""

    ONE_CHUNK = "one chunk asked for"
    BY_PRICE = "left in one chunk by the planner"
    ONE_EXPERT = "one local expert: nothing to split by"
    CLAMPED = "more chunks asked for than there are local experts"
    GATHERED = (
        "all-gathered whole: chunks of experts would repeat the reduce-scatter; "
        "chunk_by = tokens splits it"
    )
    UNEVEN_SLICES = (
        "all-gathered whole: the tokens of a rank are not known to split evenly in that many slices"
    )
    BY_TOKENS = (
        "chunks of tokens: a weight's gradient is summed over chunks, off by at most "
        "chunks * eps / 2 of the sum of their magnitudes; in four and eight bytes, whose products "
        "a CPU rounds by their number of rows, outputs and all gradients may round otherwise"
    )


class SplitBound(enum.Enum):
    """What `attention_split` changes. Values are what reports print."""

    QKV = (
        "q, k and v projected by groups of heads: gradients of what the groups share are summed "
        "over them, off by at most chunks * eps / 2 of the sum of their magnitudes"
    )
    OUT = (
        "output projection summed over groups of heads: off by at most chunks * eps / 2 of the "
        "sum of their magnitudes"
    )


def plan_num_chunks(
    config: MegaMoEConfig, region: MoERegion, decision: Decision | None = None
) -> tuple[int, Remark | None]:
    """Return the number of chunks for `region`, and a remark when it is not what was asked.

    "auto" is what the planner decided, where it could.
    """
    if config.chunks == "auto" and decision is not None and region.num_local_experts > 1:
        num_chunks = decision.chosen.candidate.num_chunks
        if num_chunks == 1:
            return 1, Remark.BY_PRICE
        return num_chunks, Remark.BY_TOKENS if config.chunk_by == "tokens" else None
    asked = AUTO_CHUNKS if config.chunks == "auto" else int(config.chunks)
    num_chunks = min(asked, region.num_local_experts)
    if asked == 1:
        return 1, Remark.ONE_CHUNK
    if config.chunk_by == "tokens":
        return asked, Remark.BY_TOKENS
    if region.num_local_experts == 1:
        return 1, Remark.ONE_EXPERT
    clamped = num_chunks < asked and config.chunks != "auto"
    return num_chunks, Remark.CLAMPED if clamped else None


def plan_token_slices(
    config: MegaMoEConfig, found: TokenRows, decision: Decision | None = None
) -> tuple[int, Remark | None]:
    """Return the slices of tokens an all-gathered region runs in, and a remark unless as asked.

    "auto" is what the planner decided, where it could.
    """
    if config.chunks == "auto" and config.chunk_by == "tokens" and decision is not None:
        num_slices = decision.chosen.candidate.num_chunks
        return num_slices, Remark.BY_PRICE if num_slices == 1 else Remark.BY_TOKENS
    asked = AUTO_CHUNKS if config.chunks == "auto" else int(config.chunks)
    if asked == 1:
        return 1, Remark.ONE_CHUNK
    if config.chunk_by != "tokens":
        return 1, Remark.GATHERED
    num_tokens = known_rows(found.tokens)
    if not num_tokens or num_tokens % asked or found.rows_per_token is None:
        return 1, Remark.UNEVEN_SLICES
    return asked, Remark.BY_TOKENS


def plan_head_groups(
    config: MegaMoEConfig, region: AttentionRegion, decision: Decision | None = None
) -> tuple[int, AttentionRefusal | None]:
    """Return the number of groups of heads for `region`, and why it is one; else None.

    "auto" changes no bit, and is what the planner decided; where it could not, two groups where
    the local KV heads are even in number, else one.
    """
    asked = config.attention_chunks
    if asked == 1:
        return 1, AttentionRefusal.ONE_GROUP
    if region.head is None:
        return 1, AttentionRefusal.ONE_KV_HEAD
    if asked == "auto" and region.rounds:
        return 1, AttentionRefusal.MAY_ROUND
    if asked == "auto" and decision is not None:
        num_groups = decision.chosen.candidate.num_chunks
        return num_groups, AttentionRefusal.BY_PRICE if num_groups == 1 else None
    num_groups = AUTO_CHUNKS if asked == "auto" else int(asked)
    if region.head.size % num_groups:
        return 1, AttentionRefusal.NOT_DIVISIBLE
    if asked == "auto" and region.may_round(num_groups):
        return 1, AttentionRefusal.MAY_ROUND
    return num_groups, None
