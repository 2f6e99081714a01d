"""Programs of which something is asked by name; those in two hops, or in parts, plainer.

Contract
    What stands around the rows keeps most layers out of two hops, and most graphs whole: two thirds
    of the programs that ask for hops or parts have little that reads or sends more than rows and
    their sums. Those in parts have attention over sequences beside their experts, and more tokens.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Final

from hypothesis import strategies as st

from moe_compile.testing.programs.choices import (
    MIXES_SEQUENCES,
    Detail,
    Order,
    Reader,
    Rewrite,
    Within,
)
from moe_compile.testing.programs.exchange_choices import Move
from moe_compile.testing.programs.grammar import (
    HOPPING,
    PARTED,
    Attention,
    Capacity,
    Experts,
    Layer,
    OwnAttention,
    Program,
)
from moe_compile.testing.programs.legal import legal
from moe_compile.testing.programs.sender_choices import Padding
from moe_compile.testing.programs.strategy import FILLING, LEAVES_WHOLE, programs

SENDS_MORE: Final = frozenset({Detail.PROBS_TRAVEL, Detail.SURE, Detail.ONE_NUMBER})
"""What travels beside the rows, or instead of them."""

FOLLOWED: Final = frozenset(
    {
        Reader.SEEN, Reader.STATISTICS, Reader.LATE_STATISTICS, Reader.NO_DROPOUT, Reader.EXPANDED,
        Reader.REPEATED,
    }
)  # fmt: skip
"""What the plainer programs may read besides."""

SORTS: Final = frozenset({Order.ARGSORT, Order.SORT})
"""Orders that are followed whatever puts rows back."""

WITHINS: Final = (
    *[within for within in Within if within not in MIXES_SEQUENCES] * 3,
    *(Within.CLASS_TOKEN, Within.QUERIES, Within.POSITION_BIAS, Within.NO_DROPOUT) * 3,
    *MIXES_SEQUENCES,
)
"""Attention of such programs: one decoy keeps the whole batch together, and hides a fault."""


@st.composite
def asked_programs(draw: st.DrawFn, rewrite: str = "", layers: str = "") -> Program:
    """Draw a program of such layers that asks for `rewrite`, where it may; "" is any."""
    program = draw(programs(layers))
    if rewrite:
        program = legal(replace(program, rewrite=Rewrite[rewrite]))
    if program.rewrite in PARTED:
        program = legal(draw(_in_sequences(program)))
    if program.rewrite in {*HOPPING, *PARTED} and draw(st.sampled_from([True, True, False])):
        plainer = tuple(map(_plainer, program.layers))
        if program.rewrite in PARTED:  # one layer that is left whole keeps the others so
            plainer = tuple(map(_proven, plainer))
            width = FILLING[program.dtype]
            program = replace(program, width=width, hidden=width)
        program = legal(replace(program, layers=plainer))
    return program


@st.composite
def _in_sequences(draw: st.DrawFn, program: Program) -> Program:
    """Return `program` with attention over sequences between its layers, and some tokens more."""
    layers: list[Layer] = []
    for layer in program.layers:
        attention = st.sampled_from(WITHINS).map(lambda within: OwnAttention(within=within))
        layers += [*draw(st.lists(attention, max_size=3)), layer]
    more = draw(st.sampled_from([0, 2, 3, 4]))
    tokens = tuple(tuple(n + more for n in step) for step in program.tokens)
    doubled = tuple(tuple(2 * n for n in step) for step in tokens)
    in_sequences = len(layers) > len(program.layers)
    return replace(program, layers=tuple(layers), tokens=doubled if in_sequences else tokens)


def _proven(layer: Layer) -> Layer:
    """Return a layer of experts without what leaves it whole, or stands in a loop of its own."""
    if isinstance(layer, Attention | Capacity):
        return Experts(top_k=2)
    if not isinstance(layer, Experts):
        return layer
    if layer.order not in SORTS:
        layer = replace(layer, order=Order.ARGSORT)
    layer = replace(layer, padding=Padding.NONE)  # which experts a token chooses is not followed
    names = [f.name for f in fields(layer) if getattr(layer, f.name) in LEAVES_WHOLE]
    return replace(layer, **{name: getattr(Experts(), name) for name in names})


def _plainer(layer: Layer) -> Layer:
    """Return a layer of experts of which nothing but its rows and their sums is read or sent."""
    if not isinstance(layer, Experts):
        return layer
    return replace(
        layer,
        move=Move.FUNCTIONAL if layer.move in LEAVES_WHOLE else layer.move,
        readers=layer.readers & FOLLOWED,
        decoys=frozenset(),
        details=layer.details - LEAVES_WHOLE - SENDS_MORE,
    )
