"""Generated programs without host reads: steps whose rows have no room run again, on all ranks."""

import itertools
from dataclasses import replace

import pytest

from moe_compile.report.region_reports import NO_READS
from moe_compile.runtime.rerun import Rerun
from moe_compile.testing.programs.campaign import drawn_programs
from moe_compile.testing.programs.choices import Backward, Reader, Sharing, Splits, Style
from moe_compile.testing.programs.grammar import WITHOUT_READS, Experts, Program, Rewrite
from moe_compile.testing.programs.judge import Outcome, judgement_of
from moe_compile.testing.programs.legal import legal
from moe_compile.testing.programs.run import RankFindings, run
from moe_compile.testing.programs.run_again import Noted
from moe_compile.testing.programs.text import options_of, source_of
from tests.slow_parameters import slow_but

LAYER = Experts(
    top_k=2, style=Style.PADDED, readers=frozenset({Reader.STATISTICS, Reader.NO_DROPOUT})
)
PROGRAM = Program(
    layers=(LAYER,), tokens=((6, 6),) * 2, width=64, hidden=64, rewrite=Rewrite.NO_READS, seed=3
)
IN_CHUNKS = replace(PROGRAM, rewrite=Rewrite.NO_READS_IN_CHUNKS, tokens=((6, 6),))


@pytest.mark.parametrize("rewrite", sorted(WITHOUT_READS, key=str))
def test_such_a_program_has_as_many_tokens_on_both_ranks_and_real_ones(rewrite):
    one = replace(PROGRAM, rewrite=rewrite, row_room=1.25)
    assert legal(one).rewrite is rewrite and "\nMIRRORED = False" in source_of(one)
    assert options_of(one)["megamoe.row_room"] == 1.25
    assert (options_of(one)["megamoe.chunks"] == 1) is (rewrite is Rewrite.NO_READS)
    assert legal(replace(one, tokens=((4, 6),))).rewrite is Rewrite.CHUNKS


def test_most_programs_that_ask_for_it_can_run_without_reads():
    """The others are drawn too: they must keep their reads."""
    drawn = [*itertools.islice(drawn_programs(0, Rewrite.NO_READS.name), 48)]
    can = [any(a.style is Style.PADDED for a in program.experts) for program in drawn]
    assert 36 <= sum(can) < len(can)
    for program in itertools.compress(drawn, can):
        assert program.sharing is not Sharing.INSIDE and not program.dynamic
        assert all(a.splits is not Splits.RUNNING for a in program.experts)


SHORT, ENOUGH = 0.5, 2.0


@pytest.mark.parametrize(
    ("program", "room"),
    slow_but(
        [(PROGRAM, SHORT)],
        [(program, room) for program in (PROGRAM, IN_CHUNKS) for room in (SHORT, ENOUGH)],
    ),
)
def test_a_program_has_the_values_of_eager_once_its_steps_ran_again(two_ranks, program, room):
    """Gradients are accumulated: those of an earlier step stay, of a first run they do not."""
    kept = replace(program, row_room=room, backward=Backward.ACCUMULATED)
    found = two_ranks.run(run, source_of(legal(kept)))
    judged = judgement_of(found)
    assert judged.kind is Outcome.SAME and judged.is_chunked, judged.detail
    assert NO_READS in judged.verdicts
    for rank in found:
        assert [one.runs_again for one in rank.noted] == [room == SHORT] * len(program.tokens)


def not_again(rank, text):
    """Return the findings where ranks agree that nothing runs again."""
    agreed, Rerun.agreed = Rerun.agreed, lambda self, device: agreed(self, device) and False
    try:
        return run(rank, text)
    finally:
        Rerun.agreed = agreed


@pytest.mark.slow
def test_a_step_that_does_not_run_again_is_found(two_ranks):
    text = source_of(replace(PROGRAM, row_room=SHORT))
    found = two_ranks.run(not_again, text)
    judged = judgement_of(found)
    assert judged.kind is Outcome.WRONG and "gradient of" in judged.detail
    assert "ranks noted and agreed" in judged.detail


@pytest.mark.parametrize(
    ("own", "kind"),
    [
        ([(True, True), (False, True)], Outcome.SAME),
        ([(False, False), (False, False)], Outcome.SAME),
        ([(True, True), (False, False)], Outcome.WRONG),
        ([(True, False), (False, False)], Outcome.WRONG),
        ([(False, True), (False, True)], Outcome.WRONG),
    ],
)
def test_ranks_that_do_not_agree_are_found(own, kind):
    assert judgement_of([RankFindings(noted=[Noted(*one)]) for one in own]).kind is kind
