"""The section of programs for every rewrite: what fails in it, and for which ranks they are."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks.node.bits import check_bits, check_item, judge_item
from moe_compile.check.team import Team
from moe_compile.testing.programs.every_rewrite import ONE, PROGRAMS, items_for, on_ranks
from moe_compile.testing.programs.run import RankFindings
from tests.check.test_team import on_disk, record_at


@pytest.mark.parametrize(
    ("findings", "whys"),
    [
        ([RankFindings(num_rewritten=1), RankFindings()], []),
        ([RankFindings(num_rewritten=1), RankFindings(differences=["step 0: output"])], ["step 0"]),
        ([RankFindings(), RankFindings(verdicts=["left whole"])], ["not rewritten: left whole"]),
        (
            [RankFindings(compiled_error="ValueError"), RankFindings(num_rewritten=1)],
            ["ValueError"],
        ),
        ([RankFindings(eager_error="no such kernel"), RankFindings()], ["no such kernel"]),
        ([RankFindings(num_rewritten=1, dropped=["a pass"]), RankFindings()], ["a pass"]),
    ],
    ids=["same", "one rank differs", "left whole", "raises", "eager raises", "a pass fails"],
)
def test_what_differs_raises_or_is_left_whole_fails(tmp_path, findings, whys):
    record = record_at(tmp_path / "bits.json")
    item = next(items_for(2))
    judge_item(item, record, [(found, 1.0) for found in findings])
    failures = on_disk(record.path)["failures"]
    assert [one["what"] for one in failures] == [item.name] * len(whys)
    assert all(why in one["why"] for why, one in zip(whys, failures, strict=True))
    assert len(on_disk(record.path)["rows"]) == 1


def test_items_are_for_the_ranks_there_are_and_none_stands_for_another():
    assert {item.num_ranks for item in items_for(2)} == {2, 4}
    six = [item for item in items_for(6) if item.num_ranks == 6]
    assert len(six) >= 5 and any("two hops" in item.name for item in six)
    assert not any("two hops" in item.name for item in items_for(7) if item.num_ranks == 7)
    assert all("MIRRORED = False" in item.text for item in [*items_for(2), *six])
    names = [item.name for item in items_for(8)]
    assert len(set(names)) == len(names) > len(PROGRAMS)


def test_a_program_takes_other_numbers_of_ranks():
    assert on_ranks(ONE, 3).tokens == ((9, 14, 9),)


def run_bits(rank, path, texts):
    """Run the section on texts; return what torch is left with."""
    store = dist.PrefixStore("bits", dist.distributed_c10d._get_default_store())
    team = Team(store, rank, 2, record=record_at(path) if rank == 0 else None)
    for name, text in texts.items():
        check_item(team, SimpleNamespace(name=name, num_ranks=2, options="", text=text))
    check_bits(team, ["chunks of a loop"])
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_one_wrong_sum_is_found_and_the_program_behind_it_passes(two_ranks, tmp_path):
    text = next(items_for(2)).text
    line = "result = torch.zeros_like(x).index_add("
    assert line in text
    twice = "out = out * (1.0 + torch.compiler.is_compiling())"
    wrong = text.replace(f"        {line}", f"        {twice}\n        {line}")
    two_ranks.run(run_bits, tmp_path / "bits.json", {"counted twice": wrong})
    found = on_disk(tmp_path / "bits.json")
    assert [one["what"] for one in found["failures"]] == ["counted twice"]
    assert [row["found"] for row in found["rows"]] == ["wrong", "same"]
