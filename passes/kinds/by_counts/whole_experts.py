"""Nodes that must run only where an expert's rows are whole: they are not proven row by row.

Contract
    A chunk of whole experts computes them from the same numbers as the region does. A chunk without
    the expert must not run them; a chunk of tokens would run them on a part of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from moe_compile.graph.query import operator_at
from moe_compile.journal.reasons import Left, Reason
from moe_compile.regions.regions import MoERegion, RowProof
from passes.replay.prune import prune_other_experts


def find_mixing(
    region: MoERegion, proof: RowProof, bounds: Iterable[range], *, by_tokens: bool
) -> Left | None:
    """Return the refusal of chunks that would run such a node on other rows; None without one."""
    if by_tokens and proof.whole:
        return Left(
            Reason.ROWS_MIXED,
            f"{operator_at(proof.whole[0][0])}: a chunk has not all rows of an expert",
        )
    for chunk, experts in enumerate(bounds):
        pruned = prune_other_experts(region, proof, experts)
        for node, whose in proof.whole:
            if not whose <= set(experts) and node not in pruned.nodes:
                return Left(
                    Reason.ROWS_MIXED,
                    f"{operator_at(node)}: chunk {chunk} has no rows of its expert",
                )
    return None
