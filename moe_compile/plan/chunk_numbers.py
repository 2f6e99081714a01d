"""How many chunks a region runs in, and how many groups of heads attention.

Contract
    A function of the options and of static facts of the region: the same on every rank.
"""

from __future__ import annotations

import enum
from typing import Final

from moe_compile.attention.attention_regions import AttentionRegion
from moe_compile.capacity.capacity_regions import CapacityRegion
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import known_rows
from moe_compile.journal.left import Left
from moe_compile.journal.reasons import Reason
from moe_compile.plan.choose_plan import Decision
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.token_regions import TokenRows

AUTO_CHUNKS: Final = 2
"""What "auto" asks for where nothing can be priced: one exchange always runs beside compute."""
BY_PRICE: Final = Left(Reason.BY_PRICE)
BY_EXPERTS: Final = (
    "chunks of experts would gather and sum them again: chunk_by = 'tokens' splits them"
)
ONE_CHUNK: Final = Left(Reason.NOT_ASKED, "one chunk is asked for")


class Bound(enum.Enum):
    """What chunks change where the options ask for them. Values are what reports print."""

    BY_TOKENS = (
        "chunks of tokens: a weight's gradient is summed over chunks, off by at most "
        "chunks * eps / 2 of the sum of their magnitudes; in four and eight bytes, whose products "
        "a CPU rounds by their number of rows, outputs and all gradients may round otherwise"
    )
    HEADS = (
        "last bits may differ by group: of torch's kernel for keys and values of two sizes, or of "
        "the gradient of what no exchange brings"
    )


LAST_BITS: Final = "last bits may differ: a CPU may round a row by where it lies in memory"
"""How remarks begin on what runs in parts, and keeps operators, rows and their order."""


def last_bits_remark(why: str) -> str:
    """Return what a report says of parts whose last bits may differ, and of no others."""
    return f"{LAST_BITS} ({why}; docs/numerics.md)"


def plan_num_chunks(
    config: MegaMoEConfig, region: MoERegion | CapacityRegion, decision: Decision | None = None
) -> tuple[int, Left | None]:
    """Return the number of chunks for `region`, and a reason when it is not what was asked.

    "auto" is what the planner decided, where it could.
    """
    chosen = None if decision is None else decision.chosen.candidate
    divides = region.num_local_experts > 1 or (chosen and chosen.chunk_by == "tokens")
    if config.chunks == "auto" and chosen is not None and divides:
        num_chunks = chosen.num_chunks
        return num_chunks, BY_PRICE if num_chunks == 1 else None
    asked = AUTO_CHUNKS if config.chunks == "auto" else int(config.chunks)
    if asked == 1:
        return 1, ONE_CHUNK
    if config.chunk_by == "tokens":
        return asked, None
    num_experts = region.num_local_experts
    if num_experts >= asked:
        return asked, None
    detail = "one local expert" if num_experts == 1 else f"{num_experts} experts for {asked} chunks"
    return num_experts, Left(Reason.FEW_EXPERTS, detail)


def plan_token_slices(
    config: MegaMoEConfig, found: TokenRows, decision: Decision | None = None
) -> tuple[int, Left | None]:
    """Return the slices of tokens an all-gathered region runs in, and a reason unless as asked.

    "auto" is what the planner decided, where it could.
    """
    if config.chunks == "auto" and config.chunk_by == "tokens" and decision is not None:
        num_slices = decision.chosen.candidate.num_chunks
        return num_slices, BY_PRICE if num_slices == 1 else None
    asked = AUTO_CHUNKS if config.chunks == "auto" else int(config.chunks)
    if asked == 1:
        return 1, ONE_CHUNK
    if config.chunk_by != "tokens":
        return 1, Left(Reason.GATHERED, BY_EXPERTS)
    num_tokens = known_rows(found.tokens)
    if not num_tokens or num_tokens % asked or found.rows_per_token is None:
        detail = f"those of a rank are not known to split evenly in {asked} slices"
        return 1, Left(Reason.GATHERED, detail)
    return asked, None


def plan_head_groups(
    config: MegaMoEConfig, region: AttentionRegion, decision: Decision | None = None
) -> tuple[int, Left | None]:
    """Return the number of groups of heads for `region`, and why it is one; else None.

    "auto" changes no bit, and is what the planner decided; where it could not, two groups where
    the local KV heads are even in number, else one.
    """
    asked = config.attention_chunks
    if asked == 1:
        return 1, ONE_CHUNK
    if region.head is None:
        return 1, Left(Reason.FEW_KV_HEADS, "one local KV head")
    must_keep = asked == "auto" and not config.allows("lossy")
    if must_keep and region.rounds:
        return 1, Left(Reason.MAY_ROUND)
    if asked == "auto" and decision is not None:
        num_groups = decision.chosen.candidate.num_chunks
        return num_groups, BY_PRICE if num_groups == 1 else None
    num_groups = AUTO_CHUNKS if asked == "auto" else int(asked)
    if region.head.size % num_groups:
        detail = f"{region.head.size} heads for {num_groups} groups"
        return 1, Left(Reason.FEW_KV_HEADS, detail)
    if must_keep and region.may_round(num_groups):
        return 1, Left(Reason.MAY_ROUND)
    return num_groups, None
