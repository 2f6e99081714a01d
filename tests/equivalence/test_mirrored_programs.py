"""Layers whose counts, rows and host integers have other readers: compiled, they equal eager.

One process is both ranks (`moe_compile/testing/mirrored_rank.py`), which takes seconds a layer.
What the fuzzer draws often is not here.
"""

import pytest

from moe_compile.testing.programs.choices import (
    Act,
    Backward,
    Detail,
    Loss,
    Move,
    Padding,
    Poison,
    Reader,
    Running,
    Sharing,
    Style,
    Unsort,
    Weighing,
)
from moe_compile.testing.programs.grammar import Experts, Program, Rewrite
from moe_compile.testing.programs.judge import Outcome, judgement_of
from moe_compile.testing.programs.run import run
from moe_compile.testing.programs.text import source_of
from tests.slow_parameters import slow_but
from tests.this_torch import has_autocast_by_functions, has_hooks, need


def layer(*readers, details=(), **choices):
    return Experts(readers=frozenset(readers), details=frozenset(details), **choices)


PROGRAMS = {
    "a host integer scales what is written before the combine": Program(
        layers=(layer(Reader.HOST_RATIO, Reader.HOST_VIEW, Reader.HOST_NO_GRAD, top_k=2),)
    ),
    "two regions by one routing": Program(
        layers=(layer(style=Style.SORTED_LOOP), layer(style=Style.LOOP)),
        sharing=Sharing.ROUTING,
    ),
    "padding is NaN and cut off, gradients are taken one by one": Program(
        layers=(layer(padding=Padding.SENT, top_k=2, weighing=Weighing.NEW_AXIS),),
        tokens=((5, 5),), poison=Poison.PADDING, backward=Backward.GRAD_TWICE,
    ),
    "losses go back apart, rows are put in the order of tokens": Program(
        layers=(layer(losses=frozenset(Loss), unsort=Unsort.EMPTY, top_k=2),),
        tokens=((6, 6),), backward=Backward.APART,
    ),
    "a layer runs in two steps of three, the last of fewer tokens": Program(
        layers=(layer(top_k=2),), tokens=((5, 5), (5, 5), (2, 2)), running=Running.IF_ANY, seed=2,
    ),
    "a gradient passes a hook that a host integer scales": Program(
        layers=(layer(Reader.HOOK_COUNT, style=Style.GROUPED),)
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


def check(text, *verdicts):
    judgement = judgement_of([run(0, text)])
    assert judgement.kind is Outcome.SAME, judgement.detail
    assert not verdicts or {*judgement.verdicts} == {*verdicts}
    return judgement


@pytest.mark.parametrize("name", slow_but(QUICK, PROGRAMS))
def test_a_layer_with_readers_outside_its_region_is_chunked_and_equals_eager(name):
    program = PROGRAMS[name]
    need(*(NEEDED[r] for a in program.layers for r in a.readers & NEEDED.keys()))
    check(source_of(program), "chunked")


WHOLE = (
    Reader.ROWS_SQUARED, Reader.COUNTS_WRITTEN, Reader.ARRIVED_WRITTEN, Reader.HOOK_ROWS,
    Reader.ROWS_ACROSS, Reader.AUTOCAST_SET,
)  # fmt: skip
NEEDED = {
    Reader.HOOK_COUNT: has_hooks,
    Reader.HOOK_ROWS: has_hooks,
    Reader.AUTOCAST_SET: has_autocast_by_functions,
}
"""What a torch must capture for some readers."""


@pytest.mark.parametrize("reader", slow_but([Reader.HOOK_ROWS, Reader.ROWS_ACROSS], WHOLE))
def test_a_region_whose_motion_would_tell_is_left_whole(reader):
    need(*filter(None, [NEEDED.get(reader)]))
    program = Program(layers=(layer(reader, top_k=2),), tokens=((6, 6),))
    assert "chunked" not in check(source_of(program)).verdicts


@pytest.mark.slow
@pytest.mark.parametrize("reader", [Reader.HOST_RATIO, Reader.HOST_NO_GRAD])
def test_so_does_a_region_whose_tokens_are_gathered(two_ranks, reader):
    program = Program(layers=(layer(reader, top_k=2),), rewrite=Rewrite.GATHERED)
    judgement = judgement_of(two_ranks.run(run, source_of(program)))
    assert judgement.kind is Outcome.SAME, judgement.detail
    assert {*judgement.verdicts} == {"all-gathered"}


def test_a_check_that_a_number_of_the_host_is_another_is_still_demanded():
    """It was taken for one of the tracer's own assertions, and dropped with the old body."""
    text = source_of(Program(layers=(layer(Reader.CHECK_EQUAL),)))
    holds, raises = "torch._check(whole == x.shape[0] * WIDTH)", "RAISES = False"
    assert holds in text and raises in text
    text = text.replace(holds, "torch._check(whole == 7)").replace(raises, "RAISES = True")
    check(text)
