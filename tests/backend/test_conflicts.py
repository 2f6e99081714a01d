"""Of what ranks publish: what ends them, and what a late rank, or one that recomputes, says too."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_compile.runtime.answers import backward_entry, conflict_of, conflict_of_counts, entry
from moe_compile.runtime.call_log import CallLog, CompiledProgram, LaunchCount, ProgramCall


@dataclasses.dataclass
class Count:
    number: int

    def at_most(self):
        return self.number

    def exact(self, **_):
        return self.number


LAYER = CompiledProgram(order="one", plan="", collectives=("all_to_all",) * 3, places=("here",) * 3)
TWICE = CompiledProgram(order="two", plan="", collectives=("all_to_all",) * 6, places=("here",) * 6)


def journal(end=0, launched=0):
    found = CallLog("0/0,1", "0", [0, 1], Count(launched))
    found.end = end
    return found


def forward(program=LAYER, start=3, launched=5, is_again=False, **more):
    return entry(0, ProgramCall(1, start, program, launched, is_again), is_launched=False, **more)


BACKWARD = backward_entry(1, journal(end=3, launched=3), LAYER)
"""After the first three of a step that launches two more in its backward pass."""


@pytest.mark.parametrize(
    ("other", "is_conflict"),
    [
        (forward(), False),  # the next step
        (forward(launched=3), True),  # before the backward pass
        (forward(launched=None), False),  # where torch counts nothing
        (forward(launched=3, is_again=True), False),  # recomputed in the backward pass
        (forward(TWICE, start=0, launched=0), True),  # a layer more
        (forward(start=0, launched=0), False),  # its own forward pass
        (BACKWARD, False),
    ],
)
def test_a_backward_pass_and_what_other_ranks_launch(other, is_conflict):
    assert bool(conflict_of(journal(), other, BACKWARD)) is is_conflict
    assert bool(conflict_of(journal(), BACKWARD, other)) is is_conflict


def test_the_message_has_what_each_launches():
    said = conflict_of(journal(), forward(TWICE, start=0, launched=0), BACKWARD)
    assert "Rank 0 runs a forward pass with collectives 1 to 6, the last of them all_to_all" in said
    assert (
        "Rank 1 has launched 3 collectives, and begins the backward pass of the program at here"
        in said
    )


@pytest.mark.parametrize(
    ("end", "launched", "is_conflict"),
    [
        (3, 5, False),  # late
        (3, 6, True),
        (6, 9, False),  # has been there
        (0, 4, False),  # later still
        (3, None, False),
    ],
)
def test_a_rank_that_waits_for_one_that_launched_something_else(end, launched, is_conflict):
    found = conflict_of_counts(journal(end, launched), forward(), 1)
    assert bool(found) is is_conflict


def test_a_rank_that_is_about_to_launch_what_it_published_is_there():
    mine = journal(3, 6)
    mine.publish(LAYER)
    assert not conflict_of_counts(mine, forward(), 1)


def count_within_launch(rank):
    """Return what a watcher counts while the third collective is launched, and the rank after."""
    count = LaunchCount(dist.group.WORLD.group_name)
    start = count.at_most()
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    recent = count.recent()
    before = {n: said for n, said in recent.items() if n < max(recent)}
    with mock.patch.object(count, "recent", return_value=before):
        within = count.exact(is_between_launches=False)
    return within - start, count.exact() - start


def test_what_a_watcher_counts_within_a_launch_is_not_kept(two_ranks):
    """Torch counts a collective before it records it: the rank published one too few for good."""
    assert two_ranks.run(count_within_launch) == [(2, 3)] * 2
