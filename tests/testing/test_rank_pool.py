"""A pool's ranks fail loudly, come back, and change groups without changing processes."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single

from moe_compile.testing import rank_pool
from moe_compile.testing.rank_pool import RankFailure, RankPool


def set_up():
    os.environ["SET_UP"] = "before the group"
    assert not dist.is_initialized()


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout_s=60, at_start=set_up) as ranks:
        yield ranks


def raise_on(rank, unlucky):
    if rank == unlucky:
        raise ValueError(f"from rank {rank}")
    return os.getpid()


def wait_for_all(rank, unlucky):
    """Reduce what `unlucky`, which raises, has no part in."""
    raise_on(rank, unlucky)
    dist.all_reduce(torch.ones(1))


def total(rank, group=None):
    mine = torch.tensor([float(rank + 1)])
    dist.all_reduce(mine, group=group)
    return mine.item()


def environment(rank, name):
    return os.environ.get(name)


def how_it_started(rank):
    """Return what compiled before this rank was a copy, its error, and the code left of it."""
    warmed = sys.modules.get("moe_compile.testing.warm_start")
    kept = torch._dynamo.convert_frame.output_codes.seen
    return warmed and (warmed.__file__, warmed.FAILED, len(kept))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="ranks then start by themselves")
def test_ranks_are_copies_of_a_process_that_has_compiled_and_forgotten_what():
    here = Path(rank_pool.__file__).with_name("warm_start.py")
    before = dict(os.environ)
    with RankPool(2) as pool:
        assert pool.run(how_it_started) == [(str(here), "", 0)] * 2
        assert pool.run(total) == [3.0, 3.0]
    assert os.environ == before


def test_a_failure_names_the_rank_and_the_next_call_has_new_ranks(pool):
    before = pool.run(raise_on, None)
    with pytest.raises(RankFailure, match=r"rank 1:\n(.|\n)*from rank 1"):
        pool.run(raise_on, 1)
    after = pool.run(raise_on, None)
    assert not set(before) & set(after)
    assert pool.run(total) == [3.0, 3.0]


@pytest.mark.slow
def test_a_rank_that_hangs_is_ended_and_does_not_hide_what_failed():
    with RankPool(2, timeout_s=8) as pool:
        with pytest.raises(RankFailure, match=r"from rank 0"):
            pool.run(wait_for_all, 0)
        assert pool.run(total) == [3.0, 3.0]


def test_a_result_that_settles_the_call_ends_ranks_that_wait_for_it():
    began = time.monotonic()
    with RankPool(2, timeout_s=120) as pool:
        assert pool.run(answer_or_wait, 1, settles=bool) == [None, "no program"]
        assert pool.run(total) == [3.0, 3.0]
    assert time.monotonic() - began < 60


def answer_or_wait(rank, answers):
    if rank == answers:
        return "no program"
    return dist.all_reduce(torch.ones(1))


def compute_for(rank, seconds):
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        sum(range(10_000))
    return dist.get_rank()


@pytest.mark.slow
def test_a_rank_that_computes_longer_than_the_timeout_is_slow_and_does_not_hang():
    with RankPool(2, timeout_s=2) as pool:
        assert pool.run(compute_for, 4) == [0, 1]


@pytest.mark.slow
def test_ranks_that_do_nothing_are_ended_long_before_the_longest_time():
    began = time.monotonic()
    with (
        RankPool(2, timeout_s=3) as pool,
        pytest.raises(RankFailure, match=r"ranks \[0, 1\] did not answer within \d+ s"),
    ):
        pool.run(do_nothing, 25)
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_a_rank_waits_in_vain_for_one_that_has_answered_not_for_long():
    began = time.monotonic()
    with (
        RankPool(2, timeout_s=120, vain_s=2) as pool,
        pytest.raises(RankFailure, match=r"ranks \[0\] did not answer(.|\n)*from rank 1"),
    ):
        pool.run(wait_for_all, 1)
    assert time.monotonic() - began < 60
    with RankPool(2, timeout_s=120, vain_s=2) as pool:
        assert pool.run(do_nothing, 5) == [None, None]  # nobody has answered: they may be slow


def test_a_collective_may_give_up_before_the_ranks_are_taken_to_hang():
    with (
        RankPool(2, timeout_s=60, collective_timeout_s=2) as pool,
        pytest.raises(RankFailure, match=r"rank 0:\n(.|\n)*[Tt]imed out"),
    ):
        pool.run(wait_for_all, 1)


def do_nothing(rank, seconds):
    time.sleep(seconds)


def leave(rank):
    os._exit(3)


def test_a_process_that_ends_is_said(pool):
    with pytest.raises(RankFailure, match="process of rank 0 ended"):
        pool.run(leave)


def end_after(rank, seconds):
    threading.Timer(seconds, os._exit, [3]).start()


def test_processes_that_ended_between_calls_are_said_and_replaced(pool):
    pool.run(end_after, 0.2)
    time.sleep(1)
    with pytest.raises(RankFailure, match="process of rank 1 ended"):
        pool.run(total)
    assert pool.run(total) == [3.0, 3.0]


def with_group_of_its_own(rank):
    return total(rank, dist.new_group())


def end_group(rank):
    dist.destroy_process_group()
    return os.getpid()


def test_ranks_are_renewed_when_asked(pool):
    before = pool.run(raise_on, None)
    pool.renew()
    assert not set(before) & set(pool.run(raise_on, None))
    assert pool.run(total) == [3.0, 3.0]


def test_ranks_are_regrouped_in_the_processes_they_were(pool):
    assert pool.run(with_group_of_its_own) == [3.0, 3.0]
    before = pool.run(raise_on, None)
    pool.regroup()
    assert pool.run(total) == [3.0, 3.0]
    assert pool.run(end_group) == before
    pool.regroup()
    assert pool.run(total) == [3.0, 3.0]


def test_ranks_have_the_environment_of_their_start_and_are_set_up_first(monkeypatch):
    monkeypatch.setenv("OF_THE_OWNER", "now")
    with RankPool(1, at_start=set_up) as pool:
        assert pool.run(environment, "OF_THE_OWNER") == ["now"]
        assert pool.run(environment, "SET_UP") == ["before the group"]
    monkeypatch.delenv("OF_THE_OWNER")
    with RankPool(1) as pool:
        assert pool.run(environment, "OF_THE_OWNER") == [None]


def compile_an_exchange(rank):
    """Compile what refers to a process group; return how many threads of gloo there are."""

    def exchange(x, group=dist.group.WORLD):
        return all_to_all_single(x, None, None, group) * 2

    torch.compile(exchange, backend="aot_eager")(torch.ones(2, requires_grad=True))
    names = [comm.read_text() for comm in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks threads up in /proc")
def test_groups_of_code_that_was_compiled_end_with_it(pool):
    """Each left three threads that wake 100 times a second: 900 took a quarter of two cores."""
    threads = []
    for _ in range(3):
        pool.regroup()
        threads.append(pool.run(compile_an_exchange))
    assert threads[0][0] > 0
    assert max(threads[2]) < 2 * max(threads[0])  # a thread of gloo may have no name yet
