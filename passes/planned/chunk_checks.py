"""Refuse regions whose chunks would compute otherwise, or miss exchanges, once it is known which.

Contract
    Of regions whose rows are exchanged flat, in several chunks; others are left as decided.
"""

from __future__ import annotations

from moe_compile.graph.dependence import Dependence
from moe_compile.journal.reasons import Reason
from moe_compile.regions.regions import Refused
from passes.planned.draft import Draft
from passes.planned.whole_experts import find_mixing
from passes.replay.gradient_paths import chunk_without_gradient
from passes.replay.masked_replay import experts_of_chunks


def check_chunks(draft: Draft, dependence: Dependence) -> None:
    """Refuse a region of which a chunk would go without its exchanges in the backward pass."""
    is_flat = draft.gathered is None and draft.divided is None
    if isinstance(draft.proof, Refused) or draft.num_chunks == 1 or not is_flat:
        return
    region, proof, by_tokens = draft.region, draft.proof, draft.by_tokens
    num, by_load = draft.num_chunks, draft.by_load
    bounds = experts_of_chunks(region, num, by_tokens=by_tokens, by_load=by_load)
    mixing = find_mixing(region, proof, bounds, by_tokens=by_tokens)
    if mixing is not None:
        draft.refuse(mixing)
        return
    chunk = chunk_without_gradient(region, proof, bounds, dependence)
    if chunk is not None:
        detail = f"chunk {chunk} of {num}"
        draft.refuse(
            Refused(candidate=region.name, reason=Reason.NO_GRADIENT, detail=detail, is_region=True)
        )
