"""Generated programs whose rows come in two hops: on four ranks, two to a node."""

from dataclasses import replace

import pytest

from moe_compile.report.region_reports import IN_TWO_HOPS
from moe_compile.testing.programs.choices import Counts, Reader, Splits, Style
from moe_compile.testing.programs.grammar import TWO_HOPS, Experts, Program, Rewrite
from moe_compile.testing.programs.judge import Outcome, judgement_of
from moe_compile.testing.programs.legal import legal
from moe_compile.testing.programs.run import run
from moe_compile.testing.programs.text import options_of, source_of

TOKENS = (4, 0, 1, 4)


def program(rewrite, tokens=((4, 0),), **changes):
    layer = Experts(top_k=2, local=3, **changes)
    return legal(Program(layers=(layer,), tokens=tokens, rewrite=rewrite))


@pytest.mark.parametrize("rewrite", sorted(TWO_HOPS, key=str))
def test_such_a_program_is_for_four_ranks_and_others_for_two(rewrite):
    one = program(rewrite, splits=Splits.RUNNING)
    assert one.tokens == (TOKENS,) and legal(one) == one
    assert "\nRANKS, NODES, LOCAL = 4, 2, 3 " in source_of(one)
    assert "MIRRORED = False" in source_of(one)
    alike = legal(replace(one, tokens=((4, 4),)))
    assert alike.tokens == ((4,) * 4,) and "MIRRORED = True" in source_of(alike)
    asked = options_of(one)
    assert asked["megamoe.nodes"] == ("exact" if "HOP" in rewrite.name else "rounded")
    assert (asked.get("megamoe.chunk_by") == "tokens") is ("SLICES" in rewrite.name)
    assert asked.get("megamoe.hop_slices", 1) == (2 if "BOTH" in rewrite.name else 1)
    other = legal(Program(layers=one.layers, tokens=one.tokens, rewrite=Rewrite.CHUNKS))
    assert other.tokens == ((4, 0),) and "RANKS" not in source_of(other)


PROGRAMS = (
    (Rewrite.HOPS, {}),
    (Rewrite.NODE_SUMS, {"style": Style.GROUPED, "counts": Counts.GATHERED}),
    (Rewrite.SUM_SLICES, {"style": Style.GROUPED}),
    (Rewrite.HOPS_FP8, {"style": Style.RUNS}),
    (Rewrite.HOP_BOTH, {"style": Style.GROUPED}),
)


@pytest.mark.slow
@pytest.mark.parametrize(("rewrite", "changes"), PROGRAMS)
def test_it_does_so_on_ranks_that_mirror_each_other(rewrite, changes):
    text = source_of(program(rewrite, tokens=((4, 4),), **changes))
    judged = judgement_of([run(0, text)])
    assert (judged.kind, judged.verdicts) == (Outcome.SAME, (IN_TWO_HOPS,)), judged.detail
    assert judged.is_chunked


@pytest.mark.slow
def test_slices_that_come_in_one_hop_after_all_sum_gradients_of_weights_otherwise():
    rows_read = Experts(style=Style.SORTED_LOOP, readers=frozenset({Reader.ROWS_RETURNED}))
    drawn = Program(layers=(rows_read,), tokens=((3, 3),) * 2, dtype="bfloat16", seed=805)
    one = legal(replace(drawn, rewrite=Rewrite.HOP_SLICES))
    text = source_of(one)
    assert one.tokens == ((3,) * 4,) and "\nFLAT_BOUND = 0.05 " in text
    judged = judgement_of([run(0, text)])
    assert (judged.kind, judged.verdicts) == (Outcome.SAME, ("chunked",)), judged.detail
    assert not judged.is_chunked
    exact = text.replace("\nFLAT_BOUND = 0.05 ", "\nFLAT_BOUND = 0.0 ")
    assert judgement_of([run(0, exact)]).kind is Outcome.WRONG


@pytest.mark.slow
def test_a_sum_that_goes_wrong_on_mirrored_ranks_is_found():
    assert judgement_of([run(0, gone_wrong(tokens=((4, 4),)))]).kind is Outcome.WRONG


def gone_wrong(**changes):
    """Return a program that counts the rows of each token twice where it is compiled."""
    text = source_of(program(Rewrite.NODE_SUMS, **changes))
    line = "result = torch.zeros_like(x).index_add("
    wrong = "out = out * (1.0 + torch.compiler.is_compiling())"
    assert line in text
    return text.replace(f"        {line}", f"        {wrong}\n        {line}")
