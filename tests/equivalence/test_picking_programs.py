"""Generated programs whose layers gather tokens themselves: whole numbers, equal bit for bit."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from moe_compile.testing.programs.campaign import drawn_programs
from moe_compile.testing.programs.choices import Act, Backward, Rewrite, Routing
from moe_compile.testing.programs.features import features
from moe_compile.testing.programs.grammar import Picking, Program
from moe_compile.testing.programs.judge import Judge, Kind, judgement_of
from moe_compile.testing.programs.picking_choices import (
    Add,
    Also,
    Otherwise,
    Routed,
    Search,
    Take,
    Weigh,
)
from moe_compile.testing.programs.picking_strategy import PICKS_LEFT_WHOLE
from moe_compile.testing.programs.run import outgrows, run
from moe_compile.testing.programs.sweep import sweep
from moe_compile.testing.programs.text import source_of
from tests.slow_parameters import slow_but

PROGRAMS = {
    "beside one that mixes rows": Program(
        layers=(
            Picking(top_k=2, routed=Routed.AHEAD, also=frozenset({Also.GATED, Also.BIAS})),
            Picking(search=Search.OFFSETS, otherwise=frozenset({Otherwise.MEAN})),
        ),
        tokens=((4, 4),), dtype="float64", routing=Routing.FIRST_RANK, rewrite=Rewrite.TOKENS,
    ),
    "grouped products": Program(
        layers=(
            Picking(
                local=3, top_k=2, routed=Routed.TOGETHER, search=Search.GROUPED, add=Add.NEW,
                also=frozenset({Also.ANEW, Also.WIDER_SUMS, Also.FUNCTIONS}),
            ),
        ),
        tokens=((6, 6),), chunks=3, backward=Backward.TWICE, rewrite=Rewrite.TOKENS,
    ),
    "masks": Program(
        layers=(
            Picking(
                top_k=2, search=Search.MASK, take=Take.LEADING, add=Add.INDEXED,
                also=frozenset({Also.BATCH_OF_ONE, Also.LOSS}),
            ),
        ),
        tokens=((4, 4),), dtype="float64", rewrite=Rewrite.TOKENS,
    ),
    "rows weighed ahead": Program(
        layers=(
            Picking(
                top_k=2, search=Search.ONE_HOT, take=Take.SELECT, weigh=Weigh.AHEAD, act=Act.WHERE,
            ),
        ),
        tokens=((4, 4), (2, 2)), dtype="float32", rewrite=Rewrite.TOKENS,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def judge():
    with Judge() as judge:
        yield judge


@pytest.mark.parametrize("name", slow_but(["grouped products"], PROGRAMS))
def test_a_layer_that_gathers_its_tokens_equals_eager_in_slices(judge, name):
    judgement = judge.judge(source_of(PROGRAMS[name]))
    assert judgement.kind is Kind.SAME, judgement.detail
    assert judgement.is_chunked, judgement.verdicts


LEFT_WHOLE = {*PICKS_LEFT_WHOLE, *Otherwise}
SINGLE = [p for p in sweep() if p.rewrite is Rewrite.TOKENS and p.is_whole]
"""The plainest program with every choice of such layers alone."""


@pytest.mark.slow
def test_every_choice_runs_in_slices_that_is_not_said_to_leave_a_layer_whole(judge):
    told = {f"{type(c).__name__.lower()}: {c.name.lower()}" for c in LEFT_WHOLE}
    chunked = [p for p in SINGLE if not features(p) & told]
    assert len(chunked) > 20
    judged = {source_of(p): judge.judge(source_of(p)) for p in chunked}
    wrong = [f"{j}\n{text}" for text, j in judged.items() if j.kind is not Kind.SAME]
    assert not wrong, wrong[0]
    whole = [f"{j}\n{text}" for text, j in judged.items() if not j.is_chunked]
    assert not whole, whole[0]


def test_a_campaign_of_such_layers_draws_nothing_else():
    drawn = [*itertools.islice(drawn_programs(2, layers="picking"), 20)]
    assert all(isinstance(layer, Picking) for program in drawn for layer in program.layers)
    assert all(program.is_whole and "BOUND = 0.0" in source_of(program) for program in drawn)
    assert sum(program.rewrite is Rewrite.TOKENS for program in drawn) > 10


@pytest.mark.slow
def test_what_is_one_more_in_one_row_is_found(two_ranks):
    """No bound hides a single wrong number."""
    text = source_of(PROGRAMS["rows weighed ahead"])
    more = "x = x.index_fill(0, torch.zeros(1, dtype=torch.int64), 1.0)"
    wrong = f"if torch.compiler.is_compiling():\n            {more}\n        return x, extra"
    text = text.replace("return x, extra", wrong)
    assert judgement_of(two_ranks.run(run, text, "aot_eager")).kind is Kind.WRONG


def test_whole_numbers_that_outgrow_their_type_are_no_measure():
    """A layer applied three times made 1e27 of them, whose sums round by their order."""
    program = SimpleNamespace(WHOLE=True, DTYPE=torch.float64)
    assert not outgrows(program, [{"output": torch.tensor(2.0**43)}])
    assert outgrows(program, [{"output": torch.tensor(2.0)}, {"output": torch.tensor(-(2.0**46))}])
    in_bfloat16 = SimpleNamespace(WHOLE=True, DTYPE=torch.bfloat16)  # summed in float32
    assert not outgrows(in_bfloat16, [{"output": torch.tensor(2.0**23)}])
    assert outgrows(in_bfloat16, [{"output": torch.tensor(2.0**24)}])
    program.WHOLE = False
    assert not outgrows(program, [{"output": torch.tensor(2.0**60)}])
