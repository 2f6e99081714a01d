"""Decide where chunks of experts begin and end: at even distances, or where rows say it.

Contract
    By load where the option asks for it and every chunk runs the same nodes whatever its experts.
"""

from __future__ import annotations

from moe_compile.config import MegaMoEConfig
from moe_compile.journal.reasons import Reason
from moe_compile.regions.regions import Refused
from passes.planned.draft import Draft


def decide_edges(draft: Draft, config: MegaMoEConfig) -> None:
    """Note whether chunks of a region have edges by load, and if not though asked, why."""
    if config.chunk_edges == "load":
        draft.even_edges = _why_even(draft)
        draft.by_load = draft.even_edges is None


def _why_even(draft: Draft) -> Reason | None:
    if draft.gathered is not None:
        return Reason.GATHERED
    if draft.divided is not None:
        return Reason.TWO_HOPS
    if isinstance(draft.proof, Refused):
        return Reason.NOT_PROVEN
    if draft.num_chunks == 1:
        return draft.not_chunked or Reason.ONE_CHUNK
    if draft.num_chunks == draft.region.num_local_experts:
        return Reason.ALREADY_DONE
    proof = draft.proof
    named = proof.expert_rows or proof.writes or proof.whole
    unlike = any(len(set(padding)) > 1 for padding in proof.padding.values())
    return Reason.EXPERTS_NAMED if named or unlike else None
