"""Programs that differ by rank end every rank, with what differs, also where it waits for others.

A pool that ends like this is of no more use, so each test starts its own.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from moe_compile.errors import RankDisagreement
from moe_compile.runtime.agreement import current_agreement
from moe_compile.runtime.watcher import EXIT_STATUS
from moe_compile.testing.rank_pool import RankFailure, RankPool
from tests.backend.test_agreement import OPTIONS, compiled
from tests.layers import Centred, GroupedExperts

NOTICED_S = 10


def exchange(x, group):
    return collectives.all_to_all_single(x, None, None, group) * 2


def gather(x, group):
    return collectives.all_gather_tensor(x, 0, group) * 2


def write_at_once(path, text):
    """Write a file that whoever waits for it reads whole."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


def tell(path, rank, status):
    """Write how this rank ended and when."""
    write_at_once(path / f"rank{rank}", f"{status} {time.monotonic()}")


def write_down_the_end(path, rank):
    """Let the process that ends leave its status, when it ended, and what it said of that."""
    os.dup2(os.open(path / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    leave = os._exit

    def end(status):
        tell(path, rank, status)
        leave(status)

    os._exit = end


def run_programs(rank, path, programs):
    """Run this rank's programs in turn; which rank comes first is left to chance."""
    write_down_the_end(path, rank)
    for program in programs[rank]:
        try:
            compiled(program)(torch.ones(4, 3), dist.group.WORLD)
        except RankDisagreement as error:
            tell(path, rank, 0)
            os.write(2, f"rank {rank}: RankDisagreement: {error}".encode())
            raise


def outcome(path, programs):
    """Return each rank's status, 0 for one that raised; when each ended; what was printed."""
    with RankPool(2, timeout_s=180) as pool:
        with pytest.raises(RankFailure):
            pool.run(run_programs, path, programs)
        wait_for(path / "rank0", path / "rank1")
    found = [(path / f"rank{rank}").read_text().split() for rank in (0, 1)]
    statuses, times = zip(*found, strict=True)
    printed = "".join((path / f"stderr{rank}").read_text() for rank in (0, 1))
    return [int(s) for s in statuses], [float(t) for t in times], printed


def wait_for(*paths):
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "a rank did not end"
        time.sleep(0.1)


def test_different_graphs_end_every_rank(tmp_path):
    """Neither graph has a region: such graphs were not compared at all."""
    statuses, times, printed = outcome(tmp_path, [[exchange], [gather]])
    assert sorted(statuses) == [0, EXIT_STATUS]  # the first to come waits in its collective
    assert max(times) - min(times) < NOTICED_S
    for rank in (0, 1):
        assert f"rank {rank}: RankDisagreement: ranks" in printed
    assert "the first difference is collective 1: rank " in printed
    assert "rank 0 launches all_to_all_single(float32) at test_disagreement.py:" in printed
    assert "rank 1 launches all_gather_into_tensor(float32) at test_disagreement.py:" in printed


def test_a_graph_new_on_one_rank_only_ends_every_rank(tmp_path):
    """Rank 0 runs what it ran before and publishes nothing: rank 1's is no second digest."""
    programs = [[exchange, exchange], [exchange, gather]]
    statuses, times, printed = outcome(tmp_path, programs)
    assert EXIT_STATUS in statuses  # both wait in a collective, until one ends and its link breaks
    assert max(times) - min(times) < NOTICED_S
    for rank in (0, 1):
        assert f"rank {rank}: RankDisagreement: ranks" in printed
    assert "the first difference is collective 2: rank " in printed
    assert "rank 1 launches all_gather_into_tensor(float32)" in printed


def exchange_and_gather(x, group):
    return gather(exchange(x, group), group)


def exchange_and_exchange(x, group):
    return exchange(exchange(x, group), group)


def test_a_difference_in_what_one_rank_launches_in_one_call_ends_every_rank(tmp_path):
    """The first of two calls is as the other rank's one begins; the second does not go on so."""
    programs = [[exchange_and_gather], [exchange, exchange_and_exchange]]
    statuses, times, printed = outcome(tmp_path, programs)
    assert EXIT_STATUS in statuses
    assert max(times) - min(times) < NOTICED_S
    for rank in (0, 1):
        assert f"rank {rank}: RankDisagreement: ranks" in printed
    assert "the first difference is collective 2: rank " in printed


def end_where_the_other_waits(rank, path):
    """Rank 1 ends, which breaks the link on which rank 0 waits, while rank 0 has yet to end."""
    run = compiled(exchange)
    run(torch.ones(4, 3), dist.group.WORLD)
    if rank == 1:
        agreement = current_agreement()
        agreement.stop("rank 1 found it", agreement.store)
        os._exit(0)
    try:
        run(torch.ones(4, 3), dist.group.WORLD)
    except RankDisagreement as error:
        write_at_once(path / "raised", f"{error}\n{error.__cause__}")


def test_a_link_that_breaks_as_others_end_is_told_as_what_ended_them(tmp_path):
    with RankPool(2, timeout_s=180) as pool:
        with pytest.raises(RankFailure):
            pool.run(end_where_the_other_waits, tmp_path)
        wait_for(tmp_path / "raised")
    told, cause = (tmp_path / "raised").read_text().split("\n", 1)
    assert told == "rank 1 found it"
    assert "Connection" in cause


class Breaking(GroupedExperts):
    """Two layers of the same weights, in two graphs where `breaks` says so."""

    def forward(self, x):
        y = super().forward(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return y + super().forward(y)


def cut_what_runs(rank, path):
    """Both agree on two regions in one graph; then rank 1 runs them in two, alone."""
    write_down_the_end(path, rank)
    layer = Breaking(16, 24, 8, 2, dist.group.WORLD)
    layer.breaks = False
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    ours = torch.compile(layer, backend="megamoe", options=OPTIONS)
    ours(x)
    layer.breaks = rank == 1
    try:
        ours(x)
    except RankDisagreement as error:
        write_at_once(path / "raised", str(error))
        raise


@pytest.mark.slow
def test_a_cut_through_what_others_run_rewritten_ends_every_rank(tmp_path):
    with RankPool(2, timeout_s=180) as pool:
        with pytest.raises(RankFailure):
            pool.run(cut_what_runs, tmp_path)
        wait_for(tmp_path / "rank0", tmp_path / "raised")
    assert (tmp_path / "rank0").read_text().startswith(f"{EXIT_STATUS} ")
    assert "rewrote them differently, in different graphs" in (tmp_path / "stderr0").read_text()


def change_the_body_alone(rank, path):
    write_down_the_end(path, rank)
    layer = GroupedExperts(16, 24, 8, 2, dist.group.WORLD)
    other = Centred(16, 24, 8, 2, dist.group.WORLD)
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    ours, theirs = compiled(layer), compiled(other)
    ours(x)
    try:
        (theirs if rank == 1 else ours)(x)
    except RankDisagreement as error:
        write_at_once(path / "raised", str(error))
        raise


@pytest.mark.slow
def test_another_body_on_one_rank_after_all_agreed_ends_every_rank(tmp_path):
    """Rank 0 is in the middle of its chunks by then: there is no way back to the whole program."""
    with RankPool(2, timeout_s=180) as pool:
        with pytest.raises(RankFailure):
            pool.run(change_the_body_alone, tmp_path)
        wait_for(tmp_path / "rank0", tmp_path / "raised")
    assert (tmp_path / "rank0").read_text().startswith(f"{EXIT_STATUS} ")
    assert "rewrote them differently" in (tmp_path / "stderr0").read_text()
    assert "rewrote them differently" in (tmp_path / "raised").read_text()
