"""Generated layer programs equal eager; what differs, crashes or is torch's own is told apart."""

import enum
import itertools
import json
from dataclasses import replace
from typing import get_args

import pytest

from moe_compile.testing.programs import choices, grammar
from moe_compile.testing.programs.campaign import UNMENDED, drawn_programs, simplest, sweep
from moe_compile.testing.programs.choices import (
    Across,
    Act,
    Counts,
    Decoy,
    Detail,
    Extra,
    Fill,
    Find,
    Mixing,
    Move,
    Order,
    Put,
    Reader,
    Room,
    Routing,
    Splits,
    Style,
    Within,
    Wrapping,
)
from moe_compile.testing.programs.coverage import Coverage, all_features, covered, feature, features
from moe_compile.testing.programs.grammar import (
    Capacity,
    Experts,
    Layer,
    Program,
    Rewrite,
)
from moe_compile.testing.programs.judge import Judge, Outcome, judgement_of
from moe_compile.testing.programs.legal import legal
from moe_compile.testing.programs.run import RankFindings, run
from moe_compile.testing.programs.strategy import LEAVES_WHOLE, PROGRAMS_OF, SLOTS_LEFT_WHOLE
from moe_compile.testing.programs.text import source_of
from moe_compile.testing.programs.wanted import wanted_programs
from moe_compile.testing.rank_pool import RankFailure
from tests.slow_parameters import slow_but

FIXED = (
    Program(
        layers=(
            Experts(
                top_k=2, counts=Counts.GATHERED, style=Style.GROUPED, order=Order.SORT,
                readers=frozenset({Reader.RETURNED, Reader.SHARED_EXPERT}),
            ),
            Experts(decoys=frozenset({Decoy.MEAN})),
        ),
        tokens=((4, 2),),
    ),
    Program(
        layers=(
            Capacity(
                top_k=2, room=Room.SCARCE, fill=Fill.GATHER, across=Across.CHUNKED,
                move=Move.OF_ITSELF, extras=frozenset({Extra.LOSS, Extra.BIAS}),
            ),
            Capacity(top_k=2, mixing=frozenset({Mixing.MEAN})),
        ),
        tokens=((5, 5),), dtype="float32",
    ),
    Program(
        layers=(Capacity(top_k=2, room=Room.SIXTEEN, across=Across.BATCHED),),
        tokens=((5, 5),), dtype="float32", width=32, hidden=32, wrapping=Wrapping.AUTOCAST,
    ),
    Program(
        layers=(
            Experts(style=Style.SEARCHED, local=3, top_k=2, find=Find.MASK, put=Put.ASSIGN),
            Experts(
                style=Style.RUNS, local=3, top_k=2, act=Act.FUNCTION,
                details=frozenset({Detail.CHECKPOINT, Detail.OWN_MEAN}),
            ),
        ),
        tokens=((6, 0),), width=64, hidden=64,
    ),
    Program(layers=(Experts(style=Style.BATCHED, readers=frozenset({Reader.LATE_STATISTICS})),)),
)  # fmt: skip
"""Programs whose regions run in chunks, the first beside one that must not; the rest whole."""
CHUNKED = FIXED[:4]
NAMES = (
    "grouped", "slots of experts", "slots under autocast", "loops and a rank without tokens",
    "batched",
)  # fmt: skip

COMPILED_ALONE = "if torch.compiler.is_compiling():\n            "
FAULTS = {
    "output": "x = x + 1",
    "random state": "x = x + 0 * torch.rand(1).sum()",
    "buffer layer0.load": "self.layer0.load.add_(1)",
    "extra value 0": "extra.append(x.detach())",
}


@pytest.fixture(scope="module")
def judge():
    with Judge() as judge:
        yield judge


@pytest.mark.parametrize("program", slow_but(FIXED[2:], FIXED), ids=NAMES)
def test_a_program_equals_eager_chunked_or_whole(judge, program):
    judgement = judge.judge(source_of(program))
    assert judgement.kind is Outcome.SAME, judgement.detail
    assert judgement.is_chunked == (program in CHUNKED), judgement.verdicts


QUANTISED_ONCE = Program(
    layers=(Experts(move=Move.HALVED),),
    wrapping=Wrapping.NO_GRAD_HALF, rewrite=Rewrite.FP8, dtype="bfloat16",
)  # fmt: skip
"""Found where no gradient is taken; else its exchange is in a Function that does more."""


@pytest.mark.slow
def test_rows_of_one_call_may_travel_in_eight_bits_and_those_of_another_not(judge):
    """The whole program was held to rounding everywhere, or nowhere."""
    text = source_of(QUANTISED_ONCE)
    judgement = judge.judge(text)
    assert judgement.kind is Outcome.SAME and judgement.is_chunked, judgement.detail
    not_rounded = text.replace("pack_rows(rows, None)", "pack_rows(rows * 1.125, None)")
    assert judge.judge(not_rounded).kind is Outcome.WRONG


IN_EIGHT_BITS = Program(
    layers=(Experts(style=Style.GROUPED, top_k=2),), rewrite=Rewrite.PRODUCTS, dtype="bfloat16"
)


@pytest.mark.slow
def test_products_of_programs_are_in_eight_bits(judge):
    text = source_of(IN_EIGHT_BITS)
    judgement = judge.judge(text)
    assert judgement.kind is Outcome.SAME and judgement.is_chunked, judgement.detail
    otherwise = text.replace('offs, "blockwise", "e4m3")', 'offs, "rowwise", "e4m3")')
    assert judge.judge(otherwise).kind is Outcome.WRONG


def with_line(line):
    """Return a program that does something else where it is compiled, by anything."""
    readers = frozenset({Reader.LATE_STATISTICS})
    text = source_of(Program(layers=(Experts(style=Style.DENSE, readers=readers),)))
    return text.replace("return x, extra", f"{line}\n        return x, extra")


@pytest.mark.parametrize("name", slow_but(("output", "extra value 0"), FAULTS))
def test_what_a_compiled_program_does_otherwise_is_found(two_ranks, name):
    found = two_ranks.run(run, with_line(COMPILED_ALONE + FAULTS[name]), "aot_eager")
    judgement = judgement_of(found)
    assert judgement.kind is Outcome.WRONG
    assert f"step 0: {name} " in judgement.detail


def test_an_error_of_the_compiled_program_alone_is_a_crash(two_ranks):
    text = with_line(COMPILED_ALONE + "x.view(-1, 7919)")
    assert judgement_of(two_ranks.run(run, text, "aot_eager")).kind is Outcome.CRASH


def test_a_program_that_eager_torch_cannot_run_is_invalid(two_ranks):
    text = with_line("x.view(-1, 7919)")
    assert judgement_of(two_ranks.run(run, text, "aot_eager")).kind is Outcome.INVALID


def test_a_program_that_should_raise_and_does_not_is_wrong():
    found = RankFindings(raises=True, eager_error="RuntimeError: Expected cond to be True")
    assert judgement_of([found, found]).kind is Outcome.WRONG
    caught = RankFindings(raises=True, eager_error="RuntimeError", compiled_error="RuntimeError")
    assert judgement_of([caught, caught]).kind is Outcome.SAME


BESIDE_TORCH = Program(
    layers=(
        Experts(
            local=4, splits=Splits.SLICE_SUM, style=Style.SORTED_LOOP,
            readers=frozenset({Reader.DROPOUT}),
        ),
    ),
    wrapping=Wrapping.CHECKPOINT,
)  # fmt: skip
"""Torch cannot compile it whole, nor in pieces with its checkpoint."""


@pytest.mark.slow
def test_dropout_which_torch_draws_otherwise_is_held_to_torch(judge):
    judgement = judge.judge(source_of(BESIDE_TORCH))
    assert judgement.kind is Outcome.AS_TORCH, judgement.detail
    assert not judgement.failed


@pytest.mark.slow
def test_what_is_said_to_leave_a_layer_whole_does(judge):
    said = {
        f"{type(c).__name__.lower()}: {c.name.lower()}"
        for c in (*LEAVES_WHOLE, *SLOTS_LEFT_WHOLE - {*Act}, *Mixing)
    }
    found = [p for p in sweep() if features(p) & said]
    assert set().union(*map(features, found)) >= said
    assert not [sorted(features(p) & said) for p in found if judge.judge(source_of(p)).is_chunked]


def test_a_pass_that_failed_is_a_failure():
    found = RankFindings(dropped=["rewrite_regions: AssertionError"])
    assert judgement_of([found, found]).failed


CHOICES = (choices, grammar)


@pytest.mark.slow
def test_every_choice_of_the_grammar_is_drawn():
    named = [kind for m in CHOICES for kind in vars(m).values()]
    kinds = [k for k in named if isinstance(k, enum.EnumMeta) and k.__doc__]
    members = {f"{k.__name__.lower()}: {m.name.lower()}" for k in kinds for m in k}
    assert members == set(all_features())
    programs = [*itertools.islice(drawn_programs(0), 400)]
    assert {type(layer) for p in programs for layer in p.layers} == set(get_args(Layer))
    for layers in PROGRAMS_OF:
        programs += itertools.islice(drawn_programs(0, layers=layers), 360)
    assert members - set().union(*UNMENDED) <= set().union(*map(features, programs))


@pytest.mark.slow
def test_programs_are_python_and_a_function_of_the_seed():
    first, again = (list(itertools.islice(drawn_programs(3), 40)) for _ in range(2))
    assert first == again
    assert len({source_of(program) for program in first}) > 35
    for program in (*first, *sweep()):
        compile(source_of(program), "program.py", "exec")


LACKING = [Act.GELU, Within.NORM, Order.SEGMENTS, Extra.GATED, Decoy.MEAN]


def test_a_campaign_runs_what_the_record_lacks(tmp_path):
    record, lacking = tmp_path / "fuzz.json", {*map(feature, LACKING)}
    runs = [{"features": {name: [90, 40 * (name not in lacking), 0] for name in all_features()}}]
    record.write_text(json.dumps({"runs": runs}))
    known, again = covered(record), covered(record)
    chosen = [*itertools.islice(wanted_programs(3, known), 60)]
    assert chosen == [*itertools.islice(wanted_programs(3, again), 60)]
    assert all(features(program) & lacking for program in chosen)
    assert lacking <= set().union(*map(features, chosen))
    for program in chosen:
        assert program == legal(program)
        compile(source_of(program), "program.py", "exec")
    known.rewritten.update(dict.fromkeys(lacking, 40))
    assert not [*wanted_programs(3, known)]


def test_whatever_a_record_lacks_is_run():
    known = Coverage()
    known.rewritten.update(dict.fromkeys(all_features(), 40))
    known.tried.update(dict.fromkeys(all_features(), 40))
    without = []
    for name in all_features():
        known.rewritten[name] = known.tried[name] = 0
        program = next(wanted_programs(3, known), None)
        without += [name] if program is None or name not in features(program) else []
        known.rewritten[name] = known.tried[name] = 40
    assert without == []


def test_a_failing_program_shrinks_to_what_makes_it_fail():
    def fails(program):
        layers = program.experts
        legacy = any(a.counts is Counts.LEGACY and Reader.RETURNED in a.readers for a in layers)
        return legacy and 0 in sum(program.tokens, ())

    culprit = Experts(counts=Counts.LEGACY, readers=frozenset({Reader.RETURNED}))
    drawn = (p for p in drawn_programs(5) if any(isinstance(a, Experts) for a in p.layers))
    drawn = (p for p in drawn if p.positions == 1)  # else tokens come in whole sequences
    for program in itertools.islice(drawn, 5):
        noisy, *others = sorted(program.layers, key=lambda part: not isinstance(part, Experts))
        noisy = replace(noisy, counts=Counts.LEGACY, readers=noisy.readers | {Reader.RETURNED})
        program = replace(program, layers=(noisy, *others), tokens=((3, 2), (0, 5)))
        assert simplest(program, fails, trials=200) == Program(layers=(culprit,), tokens=((0, 5),))


class Said(Judge):
    """Every run says what stands next in `runs`: findings, or a failure of the ranks."""

    def __init__(self, *runs):
        super().__init__()
        self.runs = list(runs)
        self.num_ended = 0

    def _run(self, text, backend, reference="eager"):
        run = self.runs.pop(0)
        if isinstance(run, Exception):
            raise run
        return [run]

    def _end_all(self):
        self.num_ended += 1


LOST = RankFindings(eager_error="RuntimeError: Application timeout caused pair closure")
HUNG = RankFailure("ranks [0] did not answer within 300 s")


@pytest.mark.parametrize("first", [[LOST], [HUNG, RankFindings()]], ids=["link", "hang"])
def test_what_a_broken_link_says_is_asked_again_of_new_processes(first):
    """The hang is first compared with AOTAutograd alone, which does not hang."""
    judge = Said(*first, RankFindings())
    judgement = judge.judge("")
    assert (judgement.kind, judgement.is_second, judge.num_ended) == (Outcome.SAME, True, 1)
    assert not judge.runs


def test_what_hangs_again_is_a_hang():
    judgement = Said(HUNG, RankFindings(), HUNG, RankFindings()).judge("")
    assert (judgement.kind, judgement.is_second) == (Outcome.HANG, True)


def test_what_torch_cannot_compile_is_tried_in_new_processes():
    """AOTAutograd alone fails where a process has compiled much, and computes otherwise."""
    differs, of_torch = RankFindings(differences=["output"]), RankFindings(eager_error="of torch")
    assert Said(differs, of_torch, RankFindings()).judge("").kind is Outcome.AS_TORCH


DIED = RankFailure("rank 1:\nprocess of rank 1 ended")


@pytest.mark.parametrize("fails_in", [None, 0, 4])
def test_a_program_in_which_a_process_died_has_to_pass_five_times(fails_in):
    """The first failure is compared with AOTAutograd alone, twice, by new processes too."""
    later = [RankFindings() for _ in range(5)]
    if fails_in is not None:
        later[fails_in:] = [
            RankFindings(differences=["output"]),
            RankFindings(differences=["output"]),
        ]
    judge = Said(DIED, RankFindings(), RankFindings(), *later)
    judgement = judge.judge("")
    expected = Outcome.SAME if fails_in is None else Outcome.WRONG
    assert (judgement.kind, judgement.is_second) == (expected, True)
    assert not judge.runs


def test_other_failures_are_judged_once():
    judgement = Said(RankFindings(eager_error="ValueError: of the program")).judge("")
    assert (judgement.kind, judgement.is_second) == (Outcome.INVALID, False)


@pytest.mark.slow
def test_a_check_that_fails_ends_every_rank(judge):
    """Ranks of other shapes have other schedules: one ended before an exchange, one waited in it.

    A rank without tokens, quantised rows and autocast make schedules differ.
    """
    layer = Experts(
        top_k=2, counts=Counts.LAZY, act=Act.SIGMOID, late=True,
        details=frozenset({Detail.DUMMY, Detail.IN_PLACE_ROWS}),
        readers=frozenset({Reader.FAILING_CHECK}),
    )  # fmt: skip
    program = Program(
        layers=(layer,), hidden=32, dtype="float64", tokens=((0, 3),), routing=Routing.ONE_EXPERT,
        wrapping=Wrapping.AUTOCAST, rewrite=Rewrite.FP8, seed=217,
    )  # fmt: skip
    judgement = judge.judge(source_of(program))
    assert judgement.kind is Outcome.SAME and judgement.is_chunked, judgement.detail
