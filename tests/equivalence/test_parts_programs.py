"""Generated programs in parts of their batch equal gradient accumulation over the parts.

One process is both ranks (`moe_compile/testing/mirrored_rank.py`), which takes seconds a program.
"""

from unittest import mock

import pytest

from moe_compile.testing.programs import run as run_module
from moe_compile.testing.programs.choices import (
    Backward,
    Counts,
    Reader,
    Sharing,
    Style,
    Unsort,
    Weighing,
    Within,
    Wrapping,
)
from moe_compile.testing.programs.grammar import PARTED, Experts, OwnAttention, Program, Rewrite
from moe_compile.testing.programs.judge import Outcome, judgement_of
from moe_compile.testing.programs.legal import legal
from moe_compile.testing.programs.run import run
from moe_compile.testing.programs.text import source_of
from tests.slow_parameters import exhaustive_but, slow_but

MIXING = (Within.ALL_MEAN, Within.ALL_SUM, Within.TURNED_BACK)


def program(*withins, rewrite=Rewrite.PARTS, experts=None, **changes):
    experts = experts or Experts(top_k=2)
    layers = (*(OwnAttention(within=within) for within in withins), experts)
    given = {"tokens": ((6, 6),), "rewrite": rewrite} | changes
    return legal(Program(layers=layers, **given))


def judged(program, old="", new=""):
    text = source_of(program)
    assert not old or text.count(old) == 1
    return judgement_of([run(0, text.replace(old, new) if old else text)])


def test_steps_are_of_one_size_and_of_whole_sequences():
    one = program(Within.PLAIN, tokens=((5, 5), (9, 9), (4, 2)), dynamic=True)
    assert one.tokens == ((6, 6),) * 3 and not one.dynamic and legal(one) == one
    assert "\nPARTS, POSITIONS = 2, 2 " in source_of(one)
    other = program(rewrite=Rewrite.THREE_PARTS, tokens=((5, 5),))
    assert other.tokens == ((5, 5),) and "\nPARTS, POSITIONS = 3, 1 " in source_of(other)


@pytest.mark.slow
@pytest.mark.parametrize("last", [1, 4])
def test_a_smaller_last_batch_runs_whole_or_in_parts(last):
    """Four tokens in two parts are compiled for any size; one is no batch of two parts."""
    judgement = judged(program(tokens=((6, 6), (last, last))))
    assert judgement.kind is Outcome.SAME and judgement.is_chunked, judgement.detail


QUICK = (Within.ALL_SUM,)
SLOW = (Within.ONTO_NEW, Within.TURNED_BACK)


@pytest.mark.parametrize(
    "within",
    [*QUICK, *exhaustive_but(SLOW, [w for w in Within if w not in QUICK])],
    ids=lambda within: within.name,
)
def test_a_program_equals_accumulation_or_is_left_whole(within):
    judgement = judged(program(within))
    assert judgement.kind is Outcome.SAME, judgement.detail
    assert judgement.is_chunked == (within not in MIXING)


COUNTED = Experts(
    top_k=2, weighing=Weighing.NEW_AXIS, readers=frozenset({Reader.SEEN, Reader.NO_DROPOUT})
)  # fmt: skip
REPEATED = Experts(top_k=2, readers=frozenset({Reader.EXPANDED, Reader.REPEATED}))
COMMON = {
    "a counter gets the counts of all parts once, of each call": program(
        Within.PLAIN, experts=COUNTED, sharing=Sharing.WEIGHTS
    ),
    "parameters are repeated for each sequence and token": program(
        Within.CLASS_TOKEN, Within.QUERIES, experts=REPEATED, rewrite=Rewrite.THREE_PARTS
    ),
    "grouped experts, their rows put in order by a sum": program(
        Within.NORM,
        experts=Experts(top_k=2, style=Style.GROUPED, unsort=Unsort.EMPTY, counts=Counts.GATHERED),
    ),
    "under autocast": program(Within.PLAIN, wrapping=Wrapping.AUTOCAST, dtype="float32"),
}


@pytest.mark.parametrize("name", slow_but([*COMMON][:1], COMMON))
def test_common_forms_equal_accumulation(name):
    judgement = judged(COMMON[name])
    assert judgement.kind is Outcome.SAME and judgement.is_chunked, judgement.detail


def where_one_rank_takes_parts_for_another_program(rank, text):
    """Return the differences where every reference differs, and rank 1 alone rejects parts."""
    with (
        mock.patch.object(run_module, "_computes_as", lambda *_: rank == 0),
        mock.patch.object(run_module, "all_differences", lambda *_: ["differs"]),
    ):
        return run_module.run(rank, text).differences


def test_ranks_run_the_same_references_whatever_each_thinks_of_one(two_ranks):
    """A reference that one rank runs and the other leaves out would meet other collectives."""
    text = source_of(program(Within.PLAIN)).replace("\nMIRRORED = True ", "\nMIRRORED = False ")
    assert "\nMIRRORED = False " in text
    found = two_ranks.run(where_one_rank_takes_parts_for_another_program, text)
    assert found == [["differs"], ["differs"]]


@pytest.mark.slow
@pytest.mark.parametrize("rewrite", sorted(PARTED, key=str))
def test_a_program_of_any_size_equals_accumulation(rewrite):
    judgement = judged(program(rewrite=rewrite, tokens=((6, 6), (9, 9), (3, 3)), dynamic=True))
    assert judgement.kind is Outcome.SAME and judgement.is_chunked, judgement.detail


@pytest.mark.slow
@pytest.mark.parametrize("rewrite", sorted(PARTED, key=str))
def test_gradients_of_several_steps_and_calls_are_added_up(rewrite):
    tokens = ((6, 6), (6, 6))
    for backward in (Backward.TWICE, Backward.ACCUMULATED, Backward.EVALUATED):
        given = {"tokens": tokens, "backward": backward, "sharing": Sharing.WEIGHTS}
        judgement = judged(program(Within.PLAIN, rewrite=rewrite, **given))
        assert judgement.kind is Outcome.SAME and judgement.is_chunked, judgement.detail


RIGHT = "scores = torch.sigmoid((x @ self.router).float())"
WRONG = f"{RIGHT} + 0.5 * torch.compiler.is_compiling()"


@pytest.mark.slow
def test_what_a_program_in_parts_does_otherwise_is_found():
    assert judged(program(), RIGHT, WRONG).kind is Outcome.WRONG


WITH_GRADIENTS = [k for k in Backward if k not in (Backward.NONE, Backward.EVALUATED)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "backward", exhaustive_but((Backward.ONCE, Backward.GRAD_TWICE), WITH_GRADIENTS), ids=str
)
def test_layers_that_are_compiled_one_by_one_run_in_parts_or_whole(backward):
    """Attention of a layer without experts stays whole; gradients of its weights are one product.

    Nothing that runs whole or in parts throughout has these bits.
    """
    given = {"wrapping": Wrapping.CHECKPOINT, "dtype": "float64", "tokens": ((12, 12),)}
    one = program(Within.PLAIN, rewrite=Rewrite.THREE_PARTS, backward=backward, **given)
    judgement = judged(one)
    assert judgement.kind is Outcome.SAME and judgement.is_chunked, judgement.detail
    assert judged(one, RIGHT, WRONG).kind is Outcome.WRONG
