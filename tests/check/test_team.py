"""Ranks that work through a section's items together, and what is left when one of them cannot."""

import json
import time

import torch
import torch.distributed as dist

from moe_compile.check.sections import Record
from moe_compile.check.team import OutOfStep, Team


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
