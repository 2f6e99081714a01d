"""Layers whose counts, rows and host integers have other readers: compiled, they equal eager.

One process is both ranks (`moe_compile/testing/mirrored_rank.py`), which takes seconds a layer.
"""

import pytest

from moe_compile.testing.programs.choices import (
    Act,
    Backward,
    Detail,
    Order,
    Poison,
    Reader,
    Running,
    Sharing,
    Style,
    Wrapping,
)
from moe_compile.testing.programs.exchange_choices import Counts, Move
from moe_compile.testing.programs.grammar import Experts, Program
from moe_compile.testing.programs.judge import Kind, judgement_of
from moe_compile.testing.programs.run import run
from moe_compile.testing.programs.sender_choices import Loss, Padding, Unsort, Weighing
from moe_compile.testing.programs.text import source_of
from tests.slow_parameters import slow_but


def layer(*readers, details=(), **choices):
    return Experts(readers=frozenset(readers), details=frozenset(details), **choices)


PROGRAMS = {
    "legacy counts returned, and a late reader": Program(
        layers=(
            layer(Reader.RETURNED, Reader.LISTED, Reader.LATE_STATISTICS, counts=Counts.LEGACY),
        )
    ),
    "a host integer scales what is written before the combine": Program(
        layers=(layer(Reader.HOST_RATIO, Reader.HOST_VIEW, Reader.HOST_NO_GRAD, top_k=2),)
    ),
    "two regions by one routing": Program(
        layers=(layer(style=Style.SORTED_LOOP), layer(style=Style.LOOP)),
        sharing=Sharing.ROUTING,
    ),
    "rows of one region made with a host integer of another": Program(
        layers=(layer(Reader.HOST_NO_GRAD),), wrapping=Wrapping.NO_GRAD_HALF
    ),
    "a check of the user, and dummy rows": Program(
        layers=(layer(Reader.CHECK, Reader.AUX_LOSS, details=[Detail.DUMMY, Detail.NESTED_CAT]),)
    ),
    "grouped experts beside random numbers, rows read again": Program(
        layers=(
            layer(
                Reader.RANDOM, Reader.ROWS_READ, Reader.STATISTICS, Reader.SHARED_EXPERT,
                counts=Counts.GATHERED, style=Style.GROUPED, order=Order.SORT, local=3,
            ),
        ),
        wrapping=Wrapping.RESIDUAL,
    ),
    "padding is NaN and cut off, gradients are taken one by one": Program(
        layers=(layer(padding=Padding.SENT, top_k=2, weighing=Weighing.NEW_AXIS),),
        tokens=((5, 5),), poison=Poison.PADDING, backward=Backward.GRAD_TWICE,
    ),
    "losses go back apart, rows are put in the order of tokens": Program(
        layers=(layer(losses=frozenset(Loss), unsort=Unsort.EMPTY, top_k=2),),
        tokens=((6, 6),), backward=Backward.APART,
    ),
    "sums of rows in other words": Program(
        layers=tuple(
            layer(unsort=unsort, top_k=2)
            for unsort in (Unsort.IN_PLACE, Unsort.COLUMN_INDEX, Unsort.EINSUM)
        ),
        tokens=((6, 6),),
    ),
    "a layer runs in two steps of three, the last of fewer tokens": Program(
        layers=(layer(top_k=2),), tokens=((5, 5), (5, 5), (2, 2)), running=Running.IF_ANY, seed=2,
    ),
    "a function of the user inside of a checkpoint, and exchanges that are others": Program(
        layers=(
            layer(
                details=[Detail.CHECKPOINT], move=Move.WRITTEN_OUT, act=Act.FUNCTION,
                style=Style.SORTED_LOOP,
            ),
        )
    ),
}  # fmt: skip


QUICK = ("a host integer scales what is written before the combine",)


@pytest.mark.parametrize("name", slow_but(QUICK, PROGRAMS))
def test_a_layer_with_readers_outside_its_region_is_chunked_and_equals_eager(name):
    judgement = judgement_of([run(0, source_of(PROGRAMS[name]))])
    assert judgement.kind is Kind.SAME, judgement.detail
    assert set(judgement.verdicts) == {"chunked"}


@pytest.mark.slow
def test_chunks_of_tokens_are_off_by_roundings_alone():
    program = Program(layers=(layer(Reader.RETURNED, top_k=2, local=3),), dtype="float64")
    text = source_of(program).replace("OPTIONS = {", 'OPTIONS = {"megamoe.chunk_by": "tokens", ')
    judgement = judgement_of([run(0, text.replace("BOUND = 0.0 ", "BOUND = 1e-13 "))])
    assert judgement.kind is Kind.SAME, judgement.detail
    assert judgement.verdicts == ("chunked",)


FAILING = Program(layers=(layer(Reader.FAILING_CHECK),))


@pytest.mark.slow
def test_a_users_check_that_fails_eagerly_fails_compiled():
    judgement = judgement_of([run(0, source_of(FAILING))])
    assert judgement.kind is Kind.SAME, judgement.detail
