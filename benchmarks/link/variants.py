"""The ways a layer is run: eagerly, by Inductor, by the rival's token halves, by megamoe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from benchmarks.link.cases import (
    BASELINE,
    BLOCK_BASELINE,
    BLOCK_REORDERED,
    PARTS_BASELINE,
    PARTS_REORDERED,
    REORDERED,
    Plan,
)
from benchmarks.link.layer import TokenHalves
from moe_compile.check.forms import REORDER_PASSES

FP8_WIRES: Final = {"megamoe.dispatch_wire": "fp8", "megamoe.combine_wire": "fp8"}
MAX_ERROR: Final = 0.02
"""bfloat16 keeps 8 bits, and compilers round at other places."""
MAX_ERROR_FP8: Final = 0.06
"""25 decibels of signal to noise, the least any gradient may keep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way; `backend` None means eager."""

    name: str
    backend: str | None = "inductor"
    options: Mapping[str, Any] = field(default_factory=dict)
    in_token_halves: bool = False
    max_error: float = MAX_ERROR
    """Relative, against the reference."""
    plan: Plan | None = None
    """How a block is divided; None for a layer."""
    rivals: tuple[str, ...] = ()
    """Variants of which the fastest is to be compared with besides the baseline."""
    keeps_bits: bool = False
    """Whether, with codegen = "fx", it has the bits of its reference; else it is left out."""

    def build(
        self, layer: nn.Module, profile: Path, **more: Any
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the layer run this way, with `more` options; it compiles at its first call.

        megamoe is told the rates in `profile`, Inductor's own passes estimate by themselves.
        """
        module = TokenHalves(layer) if self.in_token_halves else layer
        if self.backend is None:
            return module
        options = dict(self.options)
        if self.backend == "megamoe":
            told = {"hardware": str(profile), **more}
            options |= {f"megamoe.{name}": value for name, value in told.items()}
        return torch.compile(module, backend=self.backend, fullgraph=True, options=options)


SLICED = Plan(attention="tp", experts="tp")
HEADS_AND_EXPERTS = Plan(attention="tp", experts="a2a")
SEQUENCE_AND_EXPERTS = Plan(attention="sp", experts="a2a")
EXPERTS_ALONE = Plan(attention="dp", experts="a2a")


def _split(chunks: int, attention_chunks: int) -> dict[str, Any]:
    return {
        "megamoe.chunks": chunks,
        "megamoe.attention_chunks": attention_chunks,
        "megamoe.equal_tokens": True,
    }


def _gathered(chunks: int) -> dict[str, Any]:
    return {
        "megamoe.dispatch": "all_gather",
        "megamoe.chunk_by": "tokens" if chunks > 1 else "auto",
        **_split(chunks, min(chunks, 2)),
    }


OF_BLOCKS: Final = (
    Variant(name=BLOCK_BASELINE, plan=SLICED),
    Variant(name=BLOCK_REORDERED, plan=SLICED, options=REORDER_PASSES),
    Variant(name="tp+a2a N=2", plan=HEADS_AND_EXPERTS, backend="megamoe", options=_split(2, 1)),
    Variant(name="sp+a2a inductor", plan=SEQUENCE_AND_EXPERTS),
    Variant(name="sp+a2a inductor reorder", plan=SEQUENCE_AND_EXPERTS, options=REORDER_PASSES),
    *(
        Variant(
            name=f"sp+a2a N={chunks}",
            plan=SEQUENCE_AND_EXPERTS,
            backend="megamoe",
            options=_split(chunks, attention_chunks),
            rivals=("sp+a2a N=1",),
        )
        for chunks, attention_chunks in ((1, 1), (2, 2), (4, 2))
    ),
    *(
        Variant(
            name=f"{plan.attention}+ag/rs N=2", plan=plan, backend="megamoe", options=_gathered(2)
        )
        for plan in (HEADS_AND_EXPERTS, SEQUENCE_AND_EXPERTS)
    ),
)
"""N is the chunks of the experts; attention goes in two groups of heads where N is more than 1."""

IN_PARTS: Final = {"megamoe.batch_parts": 2}
OF_PARTS: Final = (
    Variant(name=PARTS_BASELINE, plan=EXPERTS_ALONE),
    Variant(name=PARTS_REORDERED, plan=EXPERTS_ALONE, options=REORDER_PASSES),
    *(
        Variant(
            name=f"dp+a2a{in_parts and ' parts'}{' N=' + str(chunks) if chunks else ''}",
            plan=EXPERTS_ALONE,
            backend="megamoe",
            options={**_split(chunks or 1, 1), **(IN_PARTS if in_parts else {})},
            rivals=() if chunks == 2 and not in_parts else ("dp+a2a N=2",),
        )
        for in_parts, chunks in (("", 1), ("", 2), ("parts", 0), ("parts", 2))
    ),
    Variant(
        name="dp+a2a 4 parts",
        plan=EXPERTS_ALONE,
        backend="megamoe",
        options={**_split(1, 1), "megamoe.batch_parts": 4},
        rivals=("dp+a2a N=2",),
    ),
)
"""Two parts of the batch, with and without two chunks of the experts, and four parts."""

OF_LAYERS: Final = (
    Variant(name="eager", backend=None),
    Variant(name=BASELINE),
    Variant(name=REORDERED, options=REORDER_PASSES),
    Variant(name="token halves reorder", options=REORDER_PASSES, in_token_halves=True),
    Variant(
        name="token halves in our order",
        backend="megamoe",
        options={"megamoe.chunks": 1},
        in_token_halves=True,
    ),
    Variant(name="megamoe N=1", backend="megamoe", options={"megamoe.chunks": 1}),
    Variant(name="megamoe N=2", backend="megamoe", options={"megamoe.chunks": 2}),
    Variant(name="megamoe N=4", backend="megamoe", options={"megamoe.chunks": 4}),
    *(
        Variant(
            name=f"megamoe N={chunks} fp8",
            backend="megamoe",
            options={"megamoe.chunks": chunks, **FP8_WIRES},
            max_error=MAX_ERROR_FP8,
        )
        for chunks in (1, 2, 4)
    ),
    *(
        Variant(
            name=f"ag/rs exact N={chunks}",
            backend="megamoe",
            options=_gathered(chunks),
            rivals=("megamoe N=2",),
        )
        for chunks in (1, 2)
    ),
)


def _over_nodes(nodes: str, chunk_by: str, chunks: int, batch_parts: int = 1) -> Variant:
    """Return a way over nodes: the flat exchange ("off") or two hops, in so many chunks."""
    by = f" {chunk_by}" if chunk_by != "auto" else ""
    in_chunks = f" N={chunks}" if chunks > 1 or nodes == "off" else ""
    in_parts = f" {batch_parts} parts" if batch_parts > 1 else ""
    return Variant(
        name=f"{'flat' if nodes == 'off' else nodes}{in_parts}{by}{in_chunks}",
        backend="megamoe",
        options={
            "megamoe.nodes": nodes,
            "megamoe.chunks": chunks,
            "megamoe.chunk_by": chunk_by,
            "megamoe.batch_parts": batch_parts,
            "megamoe.equal_tokens": True,
            "megamoe.strict": True,
        },
        rivals=() if nodes == "off" else tuple(way.name for way in FLAT),
        keeps_bits=nodes != "rounded" and batch_parts == 1,
    )


FLAT: Final = (
    *(_over_nodes("off", "auto", chunks) for chunks in (1, 2, 4)),
    *(_over_nodes("off", "auto", chunks, batch_parts=2) for chunks in (1, 2)),
)
OF_NODES: Final = (
    *FLAT,
    *(
        _over_nodes(nodes, chunk_by, chunks)
        for nodes in ("exact", "rounded")
        for chunk_by, chunks in (
            ("auto", 1), ("experts", 2), ("experts", 4), ("tokens", 2), ("tokens", 4),
        )
    ),
    *(
        _over_nodes(nodes, chunk_by, chunks, batch_parts=2)
        for nodes in ("exact", "rounded")
        for chunk_by, chunks in (("auto", 1), ("experts", 2))
    ),
)  # fmt: skip
"""Parts of the batch are tokens here, where nothing mixes those of a sequence."""

VARIANTS: Final = (*OF_LAYERS, *OF_BLOCKS, *OF_PARTS, *OF_NODES)


def named_variants(names: tuple[str, ...]) -> tuple[Variant, ...]:
    """Return the variants called `names`, in that order."""
    known = {variant.name: variant for variant in VARIANTS}
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"no variant {unknown}; known: {', '.join(known)}")
    return tuple(known[name] for name in names)
