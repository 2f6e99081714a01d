"""Ranks at different places of their programs end with what differs, before these meet.

A pool that ends like this is of no more use, so each test starts its own.
"""

import os
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd
from torch.utils.checkpoint import checkpoint

from moe_compile.errors import RankDisagreement
from moe_compile.runtime.agreement import Agreement
from moe_compile.runtime.watcher import EXIT_STATUS
from moe_compile.testing.rank_pool import RankFailure, RankPool
from tests.backend.test_agreement import OPTIONS
from tests.backend.test_disagreement import NOTICED_S, tell, wait_for, write_down_the_end
from tests.layers import GroupedExperts

TIMEOUT_S = 900.0
"""Of a pool: ranks that a loaded machine hardly lets run are not taken to hang."""


class Exchange(torch.nn.Module):
    """No experts: nothing is rewritten, and nobody is asked."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, x):
        return all_to_all_single_autograd(x, None, None, self.group) * 2


def experts(group):
    return GroupedExperts(16, 24, 8, 2, group)


class Optional(torch.nn.Module):
    """A layer for images, and one for all; `breaks` has them compiled apart."""

    def __init__(self, make, breaks=False):
        super().__init__()
        self.images, self.all = make(dist.group.WORLD), make(dist.group.WORLD)
        self.breaks = breaks

    def forward(self, x, images):
        if images.any():
            x = x + self.images(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x + self.all(x)


def compiled(model):
    return torch.compile(model, backend="megamoe", options=OPTIONS)


def some_tokens():
    return torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)


def run_optional(rank, make, breaks):
    """Rank 0 alone has images."""
    out = compiled(Optional(make, breaks))(some_tokens(), torch.tensor([rank == 0]))
    yield
    out.sum().backward()


def run_beside_eager_code(rank, has_ended):
    """After an exchange of both, rank 1 runs no layer of experts but a sum, or nothing any more."""
    compiled(Exchange(dist.group.WORLD))(some_tokens())
    if rank == 0:
        yield
        compiled(experts(dist.group.WORLD))(some_tokens())
        return
    dist.distributed_c10d._get_default_store().wait(["megamoe/1/0/0,1/1/answers/1"])
    yield
    if has_ended:
        dist.destroy_process_group()
        time.sleep(2 * NOTICED_S)
    else:
        dist.all_reduce(torch.ones(2))


def skip_backward(rank):
    """Rank 0 begins the backward pass of the first step; rank 1 the second step."""
    ours = compiled(Exchange(dist.group.WORLD))
    out = ours(some_tokens())
    if rank == 1:
        time.sleep(1)
        yield
        out = ours(some_tokens())
    out.sum().backward()


def part_in_what_all_know(rank):
    """Both have run both; then rank 0 exchanges, and rank 1 sums."""
    exchanged, summed = compiled(Exchange(dist.group.WORLD)), compiled(add_up)
    x = some_tokens()
    for run in (exchanged, summed):
        run(x)
    yield
    (summed if rank else exchanged)(x)


def add_up(x):
    return all_reduce(x.detach(), "sum", dist.group.WORLD) * 2


def run_until_the_end(rank, path, steps, *arguments):
    """Run the generator `steps`; it yields where ranks are about to part.

    That is told, and when a rank published something for the last time.
    """
    write_down_the_end(path, rank)
    publish = Agreement._publish

    def publish_and_tell(*arguments):
        tell(path, f"_parts{rank}", 0)
        publish(*arguments)

    try:
        with mock.patch.object(Agreement, "_publish", publish_and_tell):
            for _ in steps(rank, *arguments):
                tell(path, f"_parts{rank}", 0)
    except RankDisagreement as error:
        tell(path, rank, 0)
        os.write(2, f"rank {rank}: RankDisagreement: {error}".encode())
        raise


def ends(path, steps, *arguments, num_ranks=2):
    """Return each rank's status, 0 for one that raised, and what it printed.

    Checks that the last rank ended within ten seconds after the last had come where they part.
    """
    ranks = range(num_ranks)
    with RankPool(num_ranks, timeout_s=TIMEOUT_S) as pool:
        with pytest.raises(RankFailure):
            pool.run(run_until_the_end, path, steps, *arguments)
        wait_for(*(path / f"rank{rank}" for rank in ranks))
    found = [(path / f"rank{rank}").read_text().split() for rank in ranks]
    parts = [float(one.read_text().split()[1]) for one in path.glob("rank_parts*")]
    assert max(float(when) for _, when in found) - max(parts) < NOTICED_S
    printed = [(path / f"stderr{rank}").read_text() for rank in ranks]
    assert all(f"rank {rank}: RankDisagreement: ranks" in printed[rank] for rank in ranks)
    return [int(status) for status, _ in found], printed


@pytest.mark.parametrize("make", [Exchange, pytest.param(experts, marks=pytest.mark.slow)])
def test_a_layer_on_one_rank_only_ends_every_rank_by_name(tmp_path, make):
    """gloo aborted, as the backward pass of one met the second layer of the other."""
    statuses, printed = ends(tmp_path, run_optional, make, False)
    assert statuses == [EXIT_STATUS, 0]
    size = 1 if make is Exchange else 3
    for said in printed:
        assert "launch different numbers of collectives in compiled code" in said
        assert f"Rank 0 runs a forward pass with collectives 1 to {2 * size}, the last" in said
        assert f"Rank 1 has launched {size} collectives, and begins the backward pass" in said
        if make is experts:  # a warning, before anything runs
            assert "ranks decided differently" in said
            assert ", 6 collectives" in said
            assert ", 3 collectives" in said


@pytest.mark.slow
@pytest.mark.parametrize("make", [Exchange, experts])
def test_a_layer_on_one_rank_only_in_a_graph_of_its_own(tmp_path, make):
    """Its exchanges pass for those of the next; rank 1 waits in its backward pass, 0 forward."""
    _, printed = ends(tmp_path, run_optional, make, True)
    for said in printed:
        assert "begins the backward pass" in said or "in a backward pass or in code" in said


@pytest.mark.slow
def test_a_rank_that_launches_what_is_not_compiled_in_place_of_what_another_waits_for(tmp_path):
    """Rank 0 waited for the group's time-out."""
    _, printed = ends(tmp_path, run_beside_eager_code, False)
    for said in printed:
        assert "Rank 0 waits until all ranks are ready to launch collectives 2 to 4" in said
        assert "Rank 1 ran compiled code up to collective 1, and has since launched 1 other" in said


@pytest.mark.slow
def test_a_backward_pass_of_one_rank_and_the_next_step_of_another(tmp_path):
    """Only rank 0 says something: rank 1 runs nothing that it did not run before."""
    _, printed = ends(tmp_path, skip_backward)
    for said in printed:
        assert "Rank 1 runs a forward pass with collectives 2 to 2" in said
        assert "Rank 0 has launched 1 collectives, and begins the backward pass" in said


@pytest.mark.slow
def test_code_that_all_ran_before_and_rank_one_otherwise(tmp_path):
    """Nobody says anything of such code; both stand still, and torch recorded it."""
    statuses, printed = ends(tmp_path, part_in_what_all_know)
    assert EXIT_STATUS in statuses
    for said in printed:
        assert (
            "Collective 3, counted over compiled and other code, is all_to_all(BFloat16) on rank 0"
            in said
        )
        assert "had launched collectives 3 to 3, at test_places_apart.py" in said
        assert "and all_reduce(BFloat16) on rank 1" in said


def wait_for_one_that_left(rank, path):
    try:
        run_until_the_end(rank, path, run_beside_eager_code, True)
    except RankDisagreement as error:
        return time.monotonic(), str(error)


@pytest.mark.slow
def test_a_rank_that_left_the_process_group_is_waited_for_no_longer(tmp_path):
    with RankPool(2, timeout_s=TIMEOUT_S) as pool:
        (ended, said), _ = pool.run(wait_for_one_that_left, tmp_path)
    assert "left the process group, and ranks [1] did not reach collective 2" in said
    left = (tmp_path / "rank_parts1").read_text().split()[1]
    assert ended - float(left) < NOTICED_S


def wait_in_a_launch(rank, limit_s):
    """Rank 1 does not come to what nobody is asked of."""
    group = dist.new_group(timeout=timedelta(seconds=limit_s))
    if rank == 1:
        return time.sleep(limit_s + 2)
    try:
        compiled(Exchange(group))(some_tokens())
    except RuntimeError as error:
        return str(error), error.__notes__


@pytest.mark.slow
def test_a_time_out_in_what_runs_first_names_the_place_and_the_ranks_that_did_not_come(tmp_path):
    with RankPool(2, timeout_s=TIMEOUT_S) as pool:
        (error, notes), _ = pool.run(wait_in_a_launch, 5)
    assert "imed out" in error
    (note,) = notes
    assert "megamoe: ranks [1] did not reach collective 1 of compiled code" in note
    assert "of ranks [0, 1], at test_places_apart.py" in note


def be_late_everywhere(rank, make):
    """Rank 1 is late in each pass, in checkpoints too; before, ranks 0 and 1 talk alone."""
    torch._dynamo.reset()
    group, x = dist.new_group(), some_tokens()
    if rank < 2:
        talk = dist.send if rank else dist.recv
        talk(torch.ones(2), 1 - rank, group=group)
    layer = make(group)
    ours = compiled(layer)
    for run in (
        ours,
        lambda x: checkpoint(ours, x, use_reentrant=False),
        lambda x: checkpoint(ours, x, use_reentrant=True),
    ):
        gradients = []
        for forward in (run, layer):
            x.grad = None
            time.sleep(3 * (rank == 1))
            out = forward(x)
            time.sleep(3 * (rank == 1))
            out.sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("make", [Exchange, experts])
def test_a_rank_that_is_late_ends_nobody(four_ranks, make):
    """What is recomputed runs in a backward pass; gloo counts messages of two as launches."""
    assert four_ranks.run(be_late_everywhere, make) == [True] * 4
