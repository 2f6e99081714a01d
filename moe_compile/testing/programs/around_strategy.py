"""Hypothesis strategies over what is around the layers of a program: its steps, groups, gradients.

Contract
    As of `strategy.py`, of which this is a part.
"""

from __future__ import annotations

from hypothesis import strategies as st

from moe_compile.testing.programs.choices import (
    Backward,
    Groups,
    Poison,
    Routing,
    Running,
    Sharing,
    Wrapping,
)
from moe_compile.testing.programs.draws import mostly
from moe_compile.testing.programs.grammar import Layer, Program


@st.composite
def around(
    draw: st.DrawFn, layers: tuple[Layer, ...], format: tuple[str, int, int], *, even: bool
) -> Program:
    """Draw a program of these layers, of a type of values, a width and a hidden one."""
    dtype, width, hidden = format
    return Program(
        layers=layers, width=width, hidden=hidden, dtype=dtype,
        tokens=draw(tokens(even=even)),
        routing=draw(mostly(Routing)),
        groups=draw(st.sampled_from([Groups.WORLD] * 12 + list(Groups))),
        sharing=draw(st.sampled_from([Sharing.NOTHING] * 5 + list(Sharing))),
        backward=draw(st.sampled_from([Backward.ONCE] * 5 + list(Backward))),
        wrapping=draw(st.sampled_from([Wrapping.BARE] * 3 + list(Wrapping))),
        running=draw(st.sampled_from([Running.ALWAYS] * 9 + [Running.IF_ANY])),
        poison=draw(st.sampled_from([Poison.NONE] * 9 + [Poison.PADDING] * 3 + list(Poison))),
        dynamic=draw(st.sampled_from([False, False, False, True])),
        chunks=draw(st.sampled_from([2, 2, 2, 3, 4])),
        seed=draw(st.integers(0, 999)),
    )  # fmt: skip


@st.composite
def tokens(draw: st.DrawFn, *, even: bool) -> tuple[tuple[int, int], ...]:
    """Draw the tokens of both ranks in one step or several; `even` has equally many on both.

    A last batch is smaller more often than steps are of any other sizes.
    """
    one = st.integers(1, 6).map(lambda t: (t, t))
    if draw(st.integers(0, 9)) == 9:
        most = draw(st.integers(3, 6))
        last = draw(st.integers(1, most - 1))
        return ((most, most),) * draw(st.sampled_from([1, 1, 2])) + ((last, last),)
    if even:
        return tuple(draw(st.lists(one, min_size=1, max_size=2)))
    number = st.sampled_from([0, *range(7)])
    uneven = st.tuples(number, number)
    first = draw(uneven if draw(st.integers(0, 4)) == 4 else one)
    rest = draw(st.sampled_from([*[0] * 20, 1, 1, 2]))  # each new size may cost a compilation
    if not rest:
        return (first,) * draw(st.sampled_from([1, 1, 2]))
    return (first, *(draw(st.one_of(one, uneven, st.just(first))) for _ in range(rest)))
