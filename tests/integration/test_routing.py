"""Rows per expert, and what follows from them."""

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_integration.routing import RoutingCounter, imbalance, rows_to_others


def test_imbalance_of_a_routing_counted_by_hand():
    rows = torch.tensor([[4.0, 4, 4, 4], [12, 4, 0, 0]])
    found = imbalance(rows, ep_degree=2, group=None)
    assert (found.experts, found.experts_worst_layer) == (2.0, 3.0)
    assert (found.ranks, found.ranks_worst_layer) == (1.5, 2.0)


@given(st.lists(st.integers(0, 50), min_size=8, max_size=8), st.integers(0, 3))
def test_rows_that_stay_are_those_of_the_ranks_own_experts(counts, rank):
    rows = torch.tensor([counts, counts], dtype=torch.float32)
    away = sum(c for i, c in enumerate(counts) if i // 2 != rank)
    assert rows_to_others(rows, ep_degree=4, ep_rank=rank, tp_degree=2) == 2 * away / 2


def test_counts_are_taken_before_torchtitan_clears_them():
    block = torch.nn.Module()
    block.moe_enabled, block.moe = True, torch.nn.Linear(2, 2)
    block.moe.register_buffer("tokens_per_expert", torch.tensor([3.0, 5.0]))
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"0": block})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clear(*_):
        block.moe.tokens_per_expert.zero_()

    optimizer.register_step_pre_hook(clear)
    counter = RoutingCounter()
    counter.watch(optimizer, [model])
    optimizer.step()
    counter.close()
    assert counter.rows.tolist() == [[3.0, 5.0]]
    assert counter.take_seconds() > 0.0 == counter.take_seconds()
    optimizer.step()
    assert counter.rows.tolist() == [[3.0, 5.0]]  # closed: it looks no more
