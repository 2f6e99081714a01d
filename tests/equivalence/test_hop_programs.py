"""Generated programs whose rows come in two hops: on four ranks, two to a node."""

import itertools

import pytest

from moe_compile.report.region_reports import IN_TWO_HOPS
from moe_compile.testing.programs.campaign import drawn_programs
from moe_compile.testing.programs.choices import Groups, Rewrite, Style
from moe_compile.testing.programs.exchange_choices import Counts, Splits
from moe_compile.testing.programs.grammar import HOPPING, Capacity, Experts, Program
from moe_compile.testing.programs.judge import Kind, judgement_of
from moe_compile.testing.programs.legal import legal
from moe_compile.testing.programs.program_options import options_of
from moe_compile.testing.programs.run import run
from moe_compile.testing.programs.text import source_of

TOKENS = (4, 0, 1, 4)


def program(rewrite, **changes):
    layer = Experts(top_k=2, local=3, **changes)
    return legal(Program(layers=(layer,), tokens=((4, 0),), rewrite=rewrite))


@pytest.mark.parametrize("rewrite", sorted(HOPPING, key=str))
def test_such_a_program_is_for_four_ranks_and_others_for_two(rewrite):
    one = program(rewrite, splits=Splits.RUNNING)
    assert one.tokens == (TOKENS,) and legal(one) == one
    assert "\nRANKS, NODES = 4, 2\n" in source_of(one) and "MIRRORED = False" in source_of(one)
    asked = options_of(one)
    assert asked["megamoe.nodes"] == ("exact" if "HOP" in rewrite.name else "rounded")
    assert (asked.get("megamoe.chunk_by") == "tokens") is ("SLICES" in rewrite.name)
    assert asked.get("megamoe.hop_slices", 1) == (2 if "BOTH" in rewrite.name else 1)
    other = legal(Program(layers=one.layers, tokens=one.tokens, rewrite=Rewrite.CHUNKS))
    assert other.tokens == ((4, 0),) and "RANKS" not in source_of(other)


def test_it_has_one_layer_of_routed_experts_over_the_default_group():
    layers = (Capacity(), Experts(local=4), Experts())
    drawn = Program(layers=layers, groups=Groups.ROWS_APART, rewrite=Rewrite.HOPS)
    assert legal(drawn).layers == layers[1:2] and legal(drawn).groups is Groups.WORLD


def test_a_campaign_of_one_rewrite_draws_nothing_else():
    drawn = [*itertools.islice(drawn_programs(2, "NODE_SUMS"), 20)]
    assert {p.rewrite for p in drawn} == {Rewrite.NODE_SUMS}
    assert all(p.num_ranks == 4 and len(p.tokens) == 1 for p in drawn)
    assert drawn == [*itertools.islice(drawn_programs(2, "NODE_SUMS"), 20)]


PROGRAMS = (
    (Rewrite.HOPS, {}),
    (Rewrite.NODE_SUMS, {"style": Style.GROUPED, "counts": Counts.GATHERED}),
    (Rewrite.HOPS, {"style": Style.RUNS, "splits": Splits.SLICE_SUM}),
    (Rewrite.NODE_SUMS, {"style": Style.SORTED_LOOP, "counts": Counts.MATRIX}),
    (Rewrite.HOP_SLICES, {"style": Style.SORTED_LOOP}),
    (Rewrite.SUM_SLICES, {"style": Style.GROUPED}),
    (Rewrite.HOPS_FP8, {"style": Style.RUNS}),
    (Rewrite.HOP_BOTH, {"style": Style.GROUPED}),
    (Rewrite.SUM_BOTH, {"style": Style.SORTED_LOOP}),
)


@pytest.mark.parametrize(
    ("rewrite", "changes"),
    [pytest.param(*p, marks=() if i < 2 else pytest.mark.slow) for i, p in enumerate(PROGRAMS)],
)
def test_it_runs_in_two_hops_and_equals_eager(four_ranks, rewrite, changes):
    judged = judgement_of(four_ranks.run(run, source_of(program(rewrite, **changes))))
    assert (judged.kind, judged.verdicts) == (Kind.SAME, (IN_TWO_HOPS,)), judged.detail
    assert judged.is_chunked


def test_a_sum_that_goes_wrong_is_found(four_ranks):
    """The compiled program alone counts a row of each token twice."""
    text = source_of(program(Rewrite.NODE_SUMS))
    line = "result = torch.zeros_like(x).index_add("
    wrong = "out = out * (1.0 + torch.compiler.is_compiling())"
    assert line in text
    text = text.replace(f"        {line}", f"        {wrong}\n        {line}")
    assert judgement_of(four_ranks.run(run, text)).kind is Kind.WRONG
