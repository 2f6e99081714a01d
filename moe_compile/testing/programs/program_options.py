"""What a generated program asks of megamoe: the options it is compiled with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moe_compile.testing.programs.choices import Rewrite
from moe_compile.testing.programs.grammar import PARTED, Attention, Program

GATHERED: Final = {"megamoe.dispatch": "all_gather", "megamoe.equal_tokens": True}

REWRITES: Final[Mapping[Rewrite, dict[str, Any]]] = {
    Rewrite.CHUNKS: {},
    Rewrite.UNSCHEDULED: {"megamoe.schedule": False},
    Rewrite.RECOMPUTE: {"megamoe.recompute": "recompute_exchanges"},
    Rewrite.MODEL_RECOMPUTE: {"megamoe.recompute": "model"},
    Rewrite.FP8: {"megamoe.dispatch_wire": "fp8"},
    Rewrite.TOKENS: {"megamoe.chunk_by": "tokens"},
    Rewrite.BY_LOAD: {"megamoe.chunk_edges": "load"},
    Rewrite.GATHERED: GATHERED,
    Rewrite.HOPS: {"megamoe.nodes": "exact"},
    Rewrite.HOP_SLICES: {"megamoe.nodes": "exact", "megamoe.chunk_by": "tokens"},
    Rewrite.HOPS_FP8: {"megamoe.nodes": "exact", "megamoe.dispatch_wire": "fp8"},
    Rewrite.NODE_SUMS: {"megamoe.nodes": "rounded"},
    Rewrite.SUM_SLICES: {"megamoe.nodes": "rounded", "megamoe.chunk_by": "tokens"},
    Rewrite.HOP_BOTH: {"megamoe.nodes": "exact", "megamoe.hop_slices": 2},
    Rewrite.SUM_BOTH: {"megamoe.nodes": "rounded", "megamoe.hop_slices": 2},
    **{rewrite: {"megamoe.batch_parts": parts} for rewrite, parts in PARTED.items()},
}


def options_of(program: Program) -> dict[str, Any]:
    """Return the options of `torch.compile` that `program` is compiled with."""
    extra = REWRITES[program.rewrite]
    heads = any(isinstance(layer, Attention) for layer in program.layers)
    groups = {"megamoe.attention_chunks": 2} if heads else {}
    return {"megamoe.chunks": program.chunks, **groups, **extra}
