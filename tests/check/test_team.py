"""Ranks that work through a section's items together, and what is left when one of them cannot."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks.node import bits
from benchmarks.node.bits import ONE, PROGRAMS, items_for, on_ranks
from moe_compile.check.sections import Record
from moe_compile.check.team import OutOfStep, Team
from moe_compile.testing.programs.run import RankFindings


def record_at(path, *, resumes=False):
    return Record(path=path, deadline=time.monotonic() + 900, resumes=resumes)


def on_disk(path):
    return json.loads(path.read_text())


def sum_of_ranks():
    mine = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(mine)
    return mine.item()


def fail_on(ranks):
    if dist.get_rank() in ranks:
        raise ValueError("from here")
    return 1.0


def add_row(record, found):
    record.add_row({"found": found})


ITEMS = {
    "sum": (sum_of_ranks, 0),
    "each alone": (sum_of_ranks, 1),
    "more ranks": (sum_of_ranks, 4),
    "fails on both": (lambda: fail_on((0, 1)), 0),
    "another sum": (sum_of_ranks, 0),
    "fails on one": (lambda: fail_on((1,)), 0),
    "never": (sum_of_ranks, 0),
}


def work_through(rank, path, attempt):
    """Be one rank of a section; return whether it came to its end."""
    store = dist.PrefixStore(str(attempt), dist.distributed_c10d._get_default_store())
    record = record_at(path, resumes=attempt > 0) if rank == 0 else None
    team = Team(store, rank, 2, record=record, collective_timeout_s=60.0)
    try:
        for what, (work, num_ranks) in ITEMS.items():
            team.run(what, work, add_row, num_ranks=num_ranks)
    except OutOfStep:
        return False
    return True


def test_items_are_done_on_all_ranks_and_new_processes_go_on_behind_what_parted_them(
    two_ranks, tmp_path
):
    path = tmp_path / "section.json"
    assert two_ranks.run(work_through, path, 0) == [False, False]
    found = on_disk(path)
    assert [row["found"] for row in found["rows"]] == [[3.0, 3.0], [1.0, 1.0], [3.0, 3.0]]
    assert [one["what"] for one in found["failures"]] == ["fails on both", "fails on one"]
    assert found["failures"][1]["why"] == "ValueError: from here (rank 1)"
    assert [one["what"] for one in found["skipped"]] == ["more ranks"]
    two_ranks.regroup()
    assert two_ranks.run(work_through, path, 1) == [True, True]
    again = on_disk(path)
    assert [row["found"] for row in again["rows"][3:]] == [[3.0, 3.0]]  # of what never ran
    assert again["failures"] == found["failures"] and again["skipped"] == found["skipped"]


def test_what_a_process_began_and_never_ended_is_a_failure(tmp_path):
    first = record_at(tmp_path / "section.json")
    assert first.begin("done") and first.begin("hangs")
    first.end("done")
    second = record_at(first.path, resumes=True)
    assert [one["what"] for one in on_disk(first.path)["failures"]] == ["hangs"]
    assert not second.begin("hangs") and second.begin("next")
    third = record_at(first.path, resumes=True)
    assert [one["what"] for one in on_disk(first.path)["failures"]] == ["hangs", "next"]
    assert third.begin("another") and not record_at(tmp_path / "other.json").data["failures"]


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
    bits.judge_item(item, record, [(found, 1.0) for found in findings])
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
        bits.check_item(team, SimpleNamespace(name=name, num_ranks=2, options="", text=text))
    bits.check_bits(team, ["chunks of a loop"])
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
