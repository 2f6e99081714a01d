"""Hypothesis strategies over layers that gather tokens themselves, and formats they are whole in.

Contract
    As of `strategy.py`, of which this is a part. All numbers are whole: a type has to hold the sums
    of a program exactly, or round each of them once.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Final

from hypothesis import strategies as st

from moe_compile.testing.programs.around_strategy import around
from moe_compile.testing.programs.choices import Act, Groups, Rewrite, Wrapping
from moe_compile.testing.programs.draws import few, mostly
from moe_compile.testing.programs.grammar import Layer, Picking, Program
from moe_compile.testing.programs.picking_choices import (
    Add,
    Also,
    Otherwise,
    Routed,
    Search,
    Take,
    Weigh,
)

ACTS: Final = (Act.RELU, Act.WHERE, Act.MASKED_FILL, Act.FUNCTION)
"""Activations that make whole numbers of whole numbers, or parts of two, four and eight."""

PICKS_LEFT_WHOLE: Final[frozenset[enum.Enum]] = frozenset({Search.BEST, Also.CHECKPOINT})
"""What leaves a layer whole whose experts take each row by itself."""

FORMATS: Final = (
    *[("float64", 16, 16), ("float64", 8, 8), ("float64", 16, 32)] * 2,
    ("float32", 16, 16), ("float32", 32, 16), ("bfloat16", 16, 16), ("bfloat16", 24, 20),
)  # fmt: skip
"""A type of values, a width and a hidden one; rows of four and eight bytes fill 64 bytes."""

GROUPED_FORMATS: Final = (("bfloat16", 16, 16), ("bfloat16", 24, 32))
"""Those that grouped products take."""


@st.composite
def picking_layers(draw: st.DrawFn, search: Search, *, whole: bool = False) -> Picking:
    """Draw a layer that finds rows by `search`; `whole` allows what leaves it whole."""
    kept = frozenset[enum.Enum]() if whole else PICKS_LEFT_WHOLE
    takes, adds, more = ([m for m in kind if m not in kept] for kind in (Take, Add, Also))
    return Picking(
        local=draw(st.sampled_from([2, 2, 2, 3, 1])),
        top_k=draw(st.sampled_from([1, 2, 2])),
        routed=draw(st.sampled_from(Routed)),
        search=search,
        take=draw(st.sampled_from(takes)),
        weigh=draw(st.sampled_from(Weigh)),
        add=draw(st.sampled_from(adds)),
        act=draw(mostly(ACTS)),
        also=draw(few(more, 4)),
    )


@st.composite
def _beside(draw: st.DrawFn, searches: list[Search]) -> tuple[Layer, ...]:
    """Draw what stands beside a layer that can run in slices."""
    kind = draw(st.sampled_from(["nothing", "nothing", "another", "whole", "otherwise"]))
    if kind == "nothing":
        return ()
    more = [Search.BEST] * len(searches) if kind == "whole" else []
    search = draw(st.sampled_from([*searches, *more]))
    layer = draw(picking_layers(search, whole=kind == "whole"))
    if kind == "otherwise":
        least, most = draw(st.sampled_from([(1, 1), (1, 1), (4, 6)]))  # several hide a fault
        chosen = st.frozensets(st.sampled_from(Otherwise), min_size=least, max_size=most)
        layer = replace(layer, otherwise=draw(chosen))
    return (layer,)


@st.composite
def programs_that_gather(draw: st.DrawFn) -> Program:
    """Draw a program of one or two such layers, asked for in slices of tokens most of the time."""
    grouped = draw(st.sampled_from([False, False, False, True]))
    format = draw(st.sampled_from(GROUPED_FORMATS if grouped else FORMATS))
    searches = [s for s in Search if s not in PICKS_LEFT_WHOLE and s is not Search.GROUPED]
    search = Search.GROUPED if grouped else draw(st.sampled_from(searches))
    layers = (
        draw(picking_layers(search)),
        *draw(_beside([*searches, Search.GROUPED] if grouped else searches)),
    )
    program = draw(around(layers if draw(st.booleans()) else layers[::-1], format, even=True))
    num_tokens = program.chunks * draw(st.integers(1, 3))
    divided = draw(st.sampled_from([True] * 4 + [False]))
    return replace(
        program,
        dynamic=program.dynamic and draw(st.booleans()),  # these are left whole
        groups=Groups.WORLD if program.groups is Groups.ROWS_APART else program.groups,
        tokens=((num_tokens,) * 2, *program.tokens[1:]) if divided else program.tokens,
        rewrite=draw(st.sampled_from([Rewrite.TOKENS] * 12 + [Rewrite.CHUNKS, Rewrite.RECOMPUTE])),
        wrapping=draw(st.sampled_from([program.wrapping, Wrapping.BARE, Wrapping.RESIDUAL])),
    )
