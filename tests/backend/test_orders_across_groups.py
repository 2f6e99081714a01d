"""Each group's order may be right and the order across groups hang: it is compared too."""

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

from moe_compile.errors import RankDisagreement
from moe_compile.first_run import programs_of
from moe_compile.graph.user_order import user_order
from moe_compile.runtime.answers import ACROSS, Answers
from moe_compile.runtime.launch_records import _Records
from moe_compile.schedule import schedule_problem
from moe_compile.testing.rank_pool import RankFailure, RankPool
from tests.backend.test_agreement import WIDTH, compiled, step
from tests.capture import dynamo_graphs
from tests.layers import WAIT, GroupedExperts


class Summed(GroupedExperts):
    """Adds a figure that ranks of another group sum, asked for early or late, and read at last."""

    is_early = False

    def __init__(self, group, other):
        super().__init__(WIDTH, 24, 8, 2, group)
        self.other = other

    def forward(self, x):
        summed = self.sum(x) if self.is_early else None
        out = super().forward(x)
        summed = self.sum(x) if summed is None else summed
        return out + WAIT(summed).to(x.dtype)

    def sum(self, x):
        return all_reduce(x.detach().float().mean(), "sum", self.other)


def scheduled_otherwise_on_rank_one(rank, path):
    """A pass of rank 1 launches the sum before the last combine; each group's order stays."""
    plan = schedule_problem.plan_launch_order

    def otherwise(nodes, predecessors, **settings):
        *first, combine, last = plan(nodes, predecessors, **settings)
        return [*first, last, combine] if "all_reduce" in last.name else [*first, combine, last]

    layer = Summed(dist.new_group(), dist.new_group())
    with mock.patch.object(schedule_problem, "plan_launch_order", otherwise if rank else plan):
        try:
            step(compiled(layer), torch.randn(8, WIDTH, dtype=torch.bfloat16))
        except RankDisagreement as error:
            (path / f"raised{rank}").write_text(str(error))
            raise


def test_another_order_across_groups_ends_all_ranks(tmp_path):
    """It ran: all that was compared were the orders on each group, which are right."""
    with RankPool(2, timeout_s=180) as pool, pytest.raises(RankFailure):
        pool.run(scheduled_otherwise_on_rank_one, tmp_path)
    said = next(tmp_path.glob("raised*")).read_text()
    assert "different orders of the collectives of several process groups" in said
    assert re.search(
        r"is number (5 of all launches on the first rank, and number 6|6 .*, and number 5) on the",
        said,
    )


class Shared:
    """The agreement of a rank that has a store in common with others."""

    prefix = "job"

    def __init__(self, rank, store):
        self.rank, self.store = rank, store

    def first_of_group(self, group, key, value):
        first = self.store.setdefault((group, key), (self.rank, value))
        return None if first[1] == value else first

    def end(self, message):
        raise RankDisagreement(message)


def compare(numbers_of_ranks):
    """Compare what ranks, in turn, say of their groups: which launches of all are each one's."""
    store = {}
    for rank, groups in enumerate(numbers_of_ranks):
        for group, numbers in groups.items():
            _Records()._compare(Shared(rank, store), "numbers", "job plan site", group, numbers)


def test_a_circle_of_ranks_that_share_one_group_each_is_found():
    """Rows of a grid, then columns; on every other rank columns, then rows: all wait for ever."""
    by_rows = [{"row 0": "1", "column 0": "2"}, {"row 0": "1", "column 1": "2"}]
    by_rows += [{"row 1": "1", "column 0": "2"}, {"row 1": "1", "column 1": "2"}]
    compare(by_rows)
    circle = [dict(groups) for groups in by_rows]
    for rank in (1, 2):
        circle[rank] = dict(zip(by_rows[rank], ("2", "1"), strict=True))
    with pytest.raises(RankDisagreement, match=r"ranks 0 and 1 .* 'row 0' is number 1 of all"):
        compare(circle)


def test_programs_written_in_another_order_across_groups_have_other_plans(fake_ranks):
    """They would be scheduled alike in name only: such ranks run what they wrote."""
    other = dist.new_group([0])
    plans = []
    for is_early in (False, True):
        layer = Summed(fake_ranks, other)
        layer.is_early = is_early
        (gm,) = dynamo_graphs(layer, torch.randn(32, WIDTH, dtype=torch.bfloat16))
        orders = user_order(gm)
        group = next(name for name in orders if len(orders[name].collectives) > 1)
        plans.append(programs_of(orders, "d" * 32, rewritten=[group])[group])
    late, early = plans
    assert (late.order, late.collectives) == (early.order, early.collectives)
    assert late.plan != early.plan
    answers = Answers(None, [])
    answers._answers = {
        ("key", 0): [{"rank": i, "plan": p.plan, "num": 3, "left": ""} for i, p in enumerate(plans)]
    }
    assert not answers.are_alike()
    assert answers.said() == f"plan dddddddd, in different orders {ACROSS}"
