"""Hypothesis strategies over layers whose experts have a capacity, and formats they are chunked in.

Contract
    As of `strategy.py`, of which this is a part.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Final, NamedTuple

from hypothesis import strategies as st

from moe_compile.testing.programs.capacity_choices import Across, Extra, Fill, Mixing, Room, Sent
from moe_compile.testing.programs.choices import Act, Heads, Style
from moe_compile.testing.programs.draws import few, mostly
from moe_compile.testing.programs.exchange_choices import Move
from moe_compile.testing.programs.grammar import Attention, Capacity, Experts, Layer

SLOTS_LEFT_WHOLE: Final[frozenset[enum.Enum]] = frozenset(
    {Act.FUNCTION, Act.WHERE, Act.MASKED_FILL, Extra.SENT_READ, Extra.CHECKPOINT, Extra.OWN_NORM}
)
"""What leaves a layer with a capacity whole that mixes no experts."""

FILLING: Final = frozenset({Act.SILU, Act.GELU, Act.SIGMOID})
"""What a CPU rounds alike where an expert's slots fill whole blocks: sixteen of them do."""

AT_ONCE: Final = (Across.OUTERMOST, Across.BATCHED, Across.MATMUL)
"""Ways that keep experts outermost, as sums of the gradient of a bias need it."""


class Formats(NamedTuple):
    """Widths whose slots fill 64 bytes, without which a CPU's products round by position."""

    dtype: str
    width: int
    hidden: int


FORMATS: Final = (
    Formats("float32", 16, 32),
    Formats("float32", 32, 16),
    Formats("float32", 16, 16),
    Formats("float64", 16, 8),
    Formats("float64", 8, 16),
    Formats("bfloat16", 32, 32),
    Formats("bfloat16", 32, 64),
    Formats("bfloat16", 16, 32),
)


def formats_of_capacity() -> st.SearchStrategy[Formats]:
    """Draw a type of values and widths for it."""
    return st.sampled_from(FORMATS)


@st.composite
def capacities(draw: st.DrawFn, *, dtype: str, whole: bool = False) -> Capacity:
    """Draw a layer with a capacity; `whole` allows what leaves it whole, but what mixes experts."""
    kept = frozenset[enum.Enum]() if whole else SLOTS_LEFT_WHOLE
    act = draw(st.sampled_from([a for a in Act if a not in kept]))
    extras = draw(few([e for e in Extra if e not in kept], 3))
    across = draw(st.sampled_from(Across))
    full = dtype == "bfloat16" or act in FILLING
    if Extra.BIAS in extras and across is Across.EINSUM and not whole:
        across = draw(st.sampled_from(AT_ONCE))
    return Capacity(
        local=draw(st.sampled_from([2, 2, 2, 3, 4, *([1] if whole else [])])),
        top_k=draw(st.sampled_from([1, 2, 2])),
        room=Room.SIXTEEN if full and not whole else draw(mostly(Room, 4)),
        fill=draw(st.sampled_from(Fill)),
        sent=draw(st.sampled_from(Sent)),
        move=draw(st.sampled_from([Move.FUNCTIONAL, Move.OF_ITSELF])),
        across=across,
        act=act,
        extras=extras,
    )


@st.composite
def mixed_capacities(draw: st.DrawFn, *, dtype: str) -> Capacity:
    """Draw a layer with a capacity that must stay whole, plain or not."""
    layer = draw(st.one_of(st.just(Capacity(top_k=2)), capacities(dtype=dtype)))
    least, most = draw(st.sampled_from([(1, 1), (1, 1), (4, 6)]))  # several hide a fault with one
    mixing = st.frozensets(st.sampled_from(Mixing), min_size=least, max_size=most)
    return replace(layer, mixing=draw(mixing))


STYLES: Final = (Style.LOOP, Style.SORTED_LOOP, Style.INDEX_ADD, Style.SEARCHED, Style.RUNS)
BESIDE: Final = ("nothing",) * 8 + ("mixed",) * 6 + ("whole",) * 4 + ("experts", "heads", "two") * 2
"""What stands beside a layer that can be chunked; other experts are plain."""


@st.composite
def layers_with_capacity(draw: st.DrawFn, *, dtype: str) -> tuple[Layer, ...]:
    """Draw a layer with a capacity that can be chunked, and what stands beside it."""
    first, beside = draw(capacities(dtype=dtype)), draw(st.sampled_from(BESIDE))
    others: dict[str, st.SearchStrategy[Layer]] = {
        "mixed": mixed_capacities(dtype=dtype),
        "whole": capacities(dtype=dtype, whole=True),
        "experts": st.sampled_from(STYLES).map(lambda style: Experts(top_k=2, style=style)),
        "heads": st.sampled_from(Heads).map(lambda heads: Attention(heads=heads)),
        "two": capacities(dtype=dtype),
    }
    if beside not in others:
        return (first,)
    layers = (first, draw(others[beside]))
    return layers if draw(st.booleans()) else layers[::-1]
