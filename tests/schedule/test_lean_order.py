"""Orders that hold little make room for launches."""

import torch

from moe_compile.schedule.choose_schedule import choose_schedule, lean_order
from moe_compile.schedule.list_schedule import incoming_order
from tests.schedule.test_list_schedule import X, exchange, letters, traced

ROWS = torch.ones(2, 16)


def gradients_by_layer(x, rows):
    """Return three large gradients of weights, each beside a product, and what is sent then."""
    gradients = []
    for _ in range(3):
        gradients.append(rows.t() @ rows)
        rows = rows @ x
    return exchange(rows), gradients


def test_what_lives_to_the_end_comes_last():
    problem, liveness = traced(gradients_by_layer, X, ROWS)
    order = lean_order(problem, liveness)
    assert letters(problem, order) == "mmmLWmmm"
    assert liveness.peak_bytes(order) < liveness.peak_bytes(incoming_order(problem))


def test_gradients_of_weights_run_beside_an_exchange_in_the_memory_of_the_graph_as_it_came():
    problem, liveness = traced(gradients_by_layer, X, ROWS)
    choice = choose_schedule(problem, liveness, 0.0)
    assert letters(problem, choice.chosen.order) == "mmmLmmWm"
    assert choice.chosen.peak_bytes <= choice.as_it_came.peak_bytes
    assert choice.chosen.score_us < choice.as_it_came.score_us
