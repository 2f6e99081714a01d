"""Programs of which something is asked by name, and those in two hops made plain more often.

Contract
    What stands around the rows keeps most layers out of two hops: two thirds of the programs that
    ask for them have nothing that reads or sends more than rows and their sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hypothesis import strategies as st

from moe_compile.testing.programs.choices import Detail, Rewrite
from moe_compile.testing.programs.exchange_choices import Move
from moe_compile.testing.programs.grammar import HOPPING, Experts, Layer, Program
from moe_compile.testing.programs.legal import legal
from moe_compile.testing.programs.strategy import LEAVES_WHOLE, programs

SENDS_MORE: Final = frozenset({Detail.PROBS_TRAVEL, Detail.SURE, Detail.ONE_NUMBER})
"""What travels beside the rows, or instead of them."""


@st.composite
def asked_programs(draw: st.DrawFn, rewrite: str = "", layers: str = "") -> Program:
    """Draw a program of such layers that asks for `rewrite`, where it may; "" is any."""
    program = draw(programs(layers))
    if rewrite:
        program = legal(replace(program, rewrite=Rewrite[rewrite]))
    if program.rewrite in HOPPING and draw(st.sampled_from([True, True, False])):
        program = legal(replace(program, layers=tuple(map(_plainer, program.layers))))
    return program


def _plainer(layer: Layer) -> Layer:
    """Return a layer of experts of which nothing but its rows and their sums is read or sent."""
    if not isinstance(layer, Experts):
        return layer
    return replace(
        layer,
        move=Move.FUNCTIONAL if layer.move in LEAVES_WHOLE else layer.move,
        readers=frozenset(),
        decoys=frozenset(),
        details=layer.details - LEAVES_WHOLE - SENDS_MORE,
    )
