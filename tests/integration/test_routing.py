"""Rows per expert, and what follows from them."""

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_integration.routing import RoutingCounter, imbalance, rows_to_others


def test_imbalance_of_a_routing_counted_by_hand():
    rows = torch.tensor([[4.0, 4, 4, 4], [12, 4, 0, 0]])
    found = imbalance(rows, ep_degree=2)
    assert (found.experts, found.experts_worst_layer) == (2.0, 3.0)
    assert (found.ranks, found.ranks_worst_layer) == (1.5, 2.0)


@given(st.lists(st.integers(0, 50), min_size=8, max_size=8), st.integers(0, 3))
def test_rows_that_stay_are_those_of_the_ranks_own_experts(counts, rank):
    rows = torch.tensor([counts, counts], dtype=torch.float32)
    away = sum(c for i, c in enumerate(counts) if i // 2 != rank)
    assert rows_to_others(rows, ep_degree=4, ep_rank=rank, tp_degree=2) == 2 * away / 2


class Counting:
    """A model of one block that has counters, and its optimizer."""

    def __init__(self, *, clears):
        block = torch.nn.Module()
        block.moe_enabled, block.moe = True, torch.nn.Linear(2, 2)
        block.moe.register_buffer("tokens_per_expert", torch.zeros(2))
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleDict({"0": block})
        self.counts = block.moe.tokens_per_expert
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if clears:  # as torchtitan does, where it balances the load
            self.optimizer.register_step_pre_hook(self.clear)
        self.counter = RoutingCounter()
        self.counter.watch(self.optimizer, [model], group=None)

    def clear(self, *_):
        self.counts.zero_()

    def route(self, *rows):
        self.counts.add_(torch.tensor(rows))


@pytest.fixture(params=[True, False], ids=["cleared", "never cleared"])
def counting(request):
    made = Counting(clears=request.param)
    yield made
    made.counter.close()


def test_rows_are_those_of_the_last_step(counting):
    """Without load balancing torchtitan never clears its counters: sums of all steps were taken."""
    for rows in ([3.0, 5.0], [1.0, 7.0]):
        counting.route(*rows)
        counting.optimizer.step()
        assert counting.counter.rows.tolist() == counting.counter.total().tolist() == [rows]


def test_steps_and_time_are_counted_since_they_were_taken(counting):
    counting.optimizer.step()
    counting.optimizer.step()
    steps, seconds = counting.counter.take()
    assert steps == 2 and seconds > 0.0
    assert counting.counter.take() == (0, 0.0)


def test_a_closed_counter_looks_no_more(counting):
    counting.route(3.0, 5.0)
    counting.optimizer.step()
    counting.counter.close()
    counting.route(2.0, 6.0)
    counting.optimizer.step()
    assert counting.counter.rows.tolist() == [[3.0, 5.0]]
