"""The number of chunks of a region of experts, and numerical changes of chunks of any kind.

Contract
    A function of the options and of static facts of the region: the same on every rank.
"""

from __future__ import annotations

import enum
from typing import Final

from moe_compile.config import MegaMoEConfig
from moe_compile.journal.reasons import Left, Reason
from moe_compile.plan.choose_plan import Decision

AUTO_CHUNKS: Final = 2
"""Chunks that "auto" takes where nothing can be priced: one exchange always runs beside compute."""
BY_PRICE: Final = Left(Reason.BY_PRICE)
ONE_CHUNK: Final = Left(Reason.NOT_ASKED, "the options ask for one chunk")


class NumericalChange(enum.Enum):
    """Numerical changes of chunks where the options ask for them. Values are printed in reports."""

    BY_TOKENS = (
        "chunks of tokens: a weight's gradient is summed over chunks, and differs by at most "
        "chunks * eps / 2 times the sum of the magnitudes of the chunks' gradients; in float32 and "
        "float64, outputs and all gradients may round differently too, because a CPU rounds a "
        "product depending on its number of rows"
    )
    HEADS = (
        "the last bits of a group of heads may differ: in torch's kernel, if keys and values have "
        "different sizes, or in the gradient of a tensor that no exchange brings"
    )


LAST_BITS: Final = (
    "last bits may differ: a CPU may round a row differently depending on its address in memory"
)
"""Beginning of remarks on parts that keep operators, rows and their order."""


def last_bits_remark(why: str) -> str:
    """Return the remark on parts whose last bits may differ, and no other bits."""
    return f"{LAST_BITS} ({why}; docs/numerics.md)"


def plan_num_chunks(
    config: MegaMoEConfig, num_experts: int, decision: Decision | None = None
) -> tuple[int, Left | None]:
    """Return the number of chunks for so many local experts, and why it is not the number asked.

    "auto" takes the planner's decision, where there is one.
    """
    chosen = None if decision is None else decision.chosen.candidate
    divides = num_experts > 1 or (chosen and chosen.chunk_by == "tokens")
    if config.chunks == "auto" and chosen is not None and divides:
        num_chunks = chosen.num_chunks
        return num_chunks, BY_PRICE if num_chunks == 1 else None
    asked = AUTO_CHUNKS if config.chunks == "auto" else int(config.chunks)
    if asked == 1:
        return 1, ONE_CHUNK
    if config.chunk_by == "tokens":
        return asked, None
    if num_experts >= asked:
        return asked, None
    detail = (
        "one local expert"
        if num_experts == 1
        else f"{asked} chunks need as many local experts, and a rank has {num_experts}"
    )
    return num_experts, Left(Reason.FEW_EXPERTS, detail)
