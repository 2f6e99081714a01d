"""Programs that ranks take for alike end, however slow each rank and device is; others are found.

A model of ranks that does not know how orders are compared: hosts queue launches and waits, and
stop at reads until the device has done all that was queued; a device launches from one queue, as
with CUDA_DEVICE_MAX_CONNECTIONS=1, or from a queue per group. A collective runs once it is at the
head of the queues of all its ranks. Hypothesis says who moves next, so any rank may be late.
"""

import functools
import json
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._functional_collectives import all_reduce

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.errors import RankDisagreement
from moe_compile.graph.precedence import awaited, is_host_read
from moe_compile.graph.query import group_name, is_launch, is_wait
from moe_compile.runtime import launch_records
from tests.backend.test_orders_across_groups import Shared
from tests.capture import dynamo_graphs
from tests.layers import WAIT, GroupedExperts

ROWS, COLUMNS = 2, 2
RANKS = range(ROWS * COLUMNS)
AXES = ("row", "column", "all")
LAUNCH, AWAIT, READ = "launch", "await", "read"


def group_of(axis, rank):
    """Return the group of a grid of ranks that `rank` has along an axis."""
    place = {"row": rank // COLUMNS, "column": rank % COLUMNS, "all": 0}
    return f"{axis} {place[axis]}"


def ranks_of(group):
    axis = group.partition(" ")[0]
    return [rank for rank in RANKS if group_of(axis, rank) == group]


class Rank:
    """A host, what it has queued, and what its device has done of that."""

    def __init__(self, rank, steps, *, has_one_queue):
        self.steps = [(what, group_of(of, rank) if what == LAUNCH else of) for what, of in steps]
        self.has_one_queue = has_one_queue
        self.next = 0
        self.queues = {}  # name of a queue -> launches in it, as positions among all
        self.groups = []  # groups of the launches so far
        self.done = set()
        self.awaited = set()  # launches that the device's compute waits for

    def is_blocked(self):
        """Whether the host is at its end, or at a read of what the device has not computed yet."""
        if self.next == len(self.steps):
            return True
        return self.steps[self.next][0] == READ and not self.awaited <= self.done

    def move(self):
        what, of = self.steps[self.next]
        self.next += 1
        if what == LAUNCH:
            queue = "only" if self.has_one_queue else of
            self.queues.setdefault(queue, []).append(len(self.groups))
            self.groups.append(of)
        elif what == AWAIT:
            self.awaited.add(of)

    def heads(self):
        """Return, by group, the place on it of the launch that is next in its queue."""
        heads = {}
        for queue in self.queues.values():
            if queue:
                group = self.groups[queue[0]]
                heads[group] = sum(self.groups[i] == group for i in self.done)
        return heads

    def finish(self, group):
        for queue in self.queues.values():
            if queue and self.groups[queue[0]] == group:
                self.done.add(queue.pop(0))
                return

    @property
    def has_ended(self):
        return self.next == len(self.steps) and not any(self.queues.values())


class Job:
    """All ranks; a collective is done when all of its ranks have come to it."""

    def __init__(self, programs, *, has_one_queue):
        self.ranks = [Rank(r, p, has_one_queue=has_one_queue) for r, p in enumerate(programs)]

    def runnable(self):
        heads = [rank.heads() for rank in self.ranks]
        groups = {group for head in heads for group in head}
        return sorted(g for g in groups if len({heads[r].get(g) for r in ranks_of(g)}) == 1)

    def finish(self, group):
        for rank in ranks_of(group):
            self.ranks[rank].finish(group)

    def run(self, choices):
        """Have one rank, or collective, go on after another; return whether all ranks ended.

        `choices` say which, as long as there are any; then it is the first that can.
        """
        choices = iter(choices)
        while moves := [rank.move for rank in self.ranks if not rank.is_blocked()] + [
            functools.partial(self.finish, group) for group in self.runnable()
        ]:
            moves[next(choices, 0) % len(moves)]()
        return all(rank.has_ended for rank in self.ranks)


def are_taken_for_alike(programs):
    """Whether the product's comparison of all ranks' records finds nothing."""
    store = {}
    for rank, steps in enumerate(programs):
        groups = [group_of(of, rank) for what, of in steps if what == LAUNCH]
        numbers = {g: [i for i, one in enumerate(groups, 1) if one == g] for g in groups}
        launches = {g: ["all_to_all"] * len(places) for g, places in numbers.items()}
        record = {"plan": "p", "site": "s", "phase": "forward"}
        record |= {"launches": launches, "numbers": numbers}
        with mock.patch.object(
            launch_records, "current_agreement", lambda rank=rank: Shared(rank, store)
        ):
            try:
                launch_records._Records().add(json.dumps(record))
            except RankDisagreement:
                return False
    return True


@st.composite
def programs(draw):
    """The steps of one program: launches along axes, then perhaps a wait, perhaps a read."""
    steps, flying = [], []
    for place, axis in enumerate(draw(st.lists(st.sampled_from(AXES), min_size=2, max_size=8))):
        steps.append((LAUNCH, axis))
        flying.append(place)
        while flying and draw(st.booleans()):
            steps.append((AWAIT, flying.pop(0)))
        if draw(st.booleans()):
            steps.append((READ, None))
    return steps


def swapped(steps, first, second):
    """Return the program with two launches exchanged; waits keep their places."""
    places = [i for i, (what, _) in enumerate(steps) if what == LAUNCH]
    one, other = places[first % len(places)], places[second % len(places)]
    steps = list(steps)
    steps[one], steps[other] = steps[other], steps[one]
    return steps


SWAP = st.none() | st.tuples(st.sampled_from(RANKS), st.integers(0, 7), st.integers(0, 7))
"""A rank, and two launches that it has exchanged; None for no such rank."""


def outcomes(source, num_examples):
    """Return how many jobs ended, and how many did not: ranks may be late as Hypothesis likes."""
    counts = Counter()

    @settings(max_examples=num_examples, database=None, derandomize=True)
    @given(source, st.booleans(), SWAP, st.lists(st.integers(0, 9), max_size=60))
    def check(steps, has_one_queue, swap, choices):
        programs = [steps for _ in RANKS]
        if swap is not None:
            faulty, *places = swap
            programs[faulty] = swapped(steps, *places)
        has_ended = Job(programs, has_one_queue=has_one_queue).run(choices)
        is_alike = are_taken_for_alike(programs)
        assert has_ended or not is_alike, "ranks that were taken for alike wait without end"
        counts[has_ended] += 1

    check()
    return counts[True], counts[False]


def test_programs_taken_for_alike_end_whoever_is_late():
    num_ended, num_deadlocks = outcomes(programs(), 400)
    assert num_ended >= 170 and num_deadlocks >= 14


@pytest.mark.slow
def test_the_order_on_each_group_alone_would_let_deadlocks_pass():
    """The model has deadlocks that only the comparison across groups finds."""
    compare = launch_records._Records._compare

    def of_orders(self, agreement, what, *arguments):
        if what == "orders":
            compare(self, agreement, what, *arguments)

    with (
        mock.patch.object(launch_records._Records, "_compare", of_orders),
        pytest.raises(AssertionError, match="wait without end"),
    ):
        outcomes(programs(), 700)


class TwoGroups(GroupedExperts):
    """Two layers of experts, along rows and along columns, and a sum over all ranks."""

    def __init__(self, row, column, everyone):
        super().__init__(16, 24, 8, 2, row)
        self.next, self.everyone = GroupedExperts(16, 24, 8, 2, column), everyone

    def forward(self, x):
        summed = all_reduce(x.detach().float().mean(), "sum", self.everyone)
        return self.next(super().forward(x)) + WAIT(summed).to(x.dtype)


def steps_of(graph, axes):
    """Return what a scheduled graph has ranks do, in its order."""
    steps, places = [], {}
    for node in graph.nodes:
        if is_launch(node):
            places[node] = len(places)
            steps.append((LAUNCH, axes[group_name(node)]))
        elif is_wait(node) and awaited(node) in places:
            steps.append((AWAIT, places[awaited(node)]))
        elif is_host_read(node):
            steps.append((READ, None))
    return steps


@pytest.fixture(scope="module")
def scheduled(fake_ranks):
    """Forward and backward of two layers, in chunks and scheduled, as steps."""
    groups = [dist.new_group([0, 1]) for _ in AXES]
    axes = {group.group_name: axis for group, axis in zip(groups, AXES, strict=True)}
    x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(TwoGroups(*groups), x)
    made, _ = rewrite(gm, MegaMoEConfig(chunks=2))
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    return [steps_of(traced.graph, axes) for traced in trace_both(gm, inputs, made)]


def test_scheduled_graphs_end_whoever_is_late(scheduled):
    assert all(len({of for what, of in steps if what == LAUNCH}) > 1 for steps in scheduled)
    assert any(what == READ for steps in scheduled for what, _ in steps)

    num_ended, num_deadlocks = outcomes(st.sampled_from(scheduled), 400)
    assert num_ended >= 100 and num_deadlocks >= 10
