"""In which order collectives of independent parts of a graph launch."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.graph.launch_order import plan_launch_order
from moe_compile.graph.part_order import order_by_parts, products
from moe_compile.graph.precedence import find_predecessors
from moe_compile.graph.query import is_launch
from tests.scheduled_layers import c10d, one_rank_group

X = torch.ones(16, 16)


def exchanged(x):
    rows = [x.shape[0]]
    return c10d.wait_tensor(c10d.all_to_all_single(x, rows, rows, one_rank_group()))


def gathered(x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 1, one_rank_group()))


def layer(x):
    """Attention between collectives, then dispatch, experts and combine."""
    x = gathered(x) @ x
    counts = exchanged(x.sum(0).long())
    return exchanged(exchanged(x + counts) @ x) + 1


def hops(x):
    """The same, each way in two exchanges."""
    return exchanged(exchanged(exchanged(exchanged(gathered(x) @ x) + 1) @ x) + 1)


def placed(program, *inputs):
    """Return which launches of the program's order run one after another, and all by level."""
    one_rank_group()
    graph = make_fx(program, tracing_mode="fake")(*inputs).graph
    nodes = list(graph.nodes)
    before = find_predecessors(graph)
    by_level = plan_launch_order(nodes, before)
    launches = [node for node in nodes if is_launch(node)]
    order = order_by_parts(nodes, before, by_level)
    assert sorted(order, key=launches.index) == launches
    return [launches.index(n) for n in order], [launches.index(n) for n in by_level]


def test_a_part_comes_to_its_exchange_before_the_next_begins():
    turns, levels = placed(lambda x, y: (layer(x), layer(y)), X, X)
    assert turns == [0, 1, 2, 4, 5, 6, 3, 7]
    assert levels == [0, 4, 1, 5, 2, 6, 3, 7]


def test_both_hops_of_a_way_are_one_leg():
    """The second comes once the next part's attention has begun, which the first runs under."""
    turns, _ = placed(lambda x, y: (hops(x), hops(y)), X, X)
    assert turns == [0, 1, 5, 2, 6, 7, 3, 4, 8, 9]


def test_launches_behind_an_assertion_take_their_turn_there():
    """What comes late to a turn, as an assertion guards it, leaves the others' in turns."""

    def program(x, y):
        one = gathered(x) @ x
        first = exchanged(exchanged(one) + 1)
        two = gathered(y) @ y
        torch.ops.aten._assert_async.msg(two.sum() > 0, "rows")
        masks = exchanged(one.sum(0).long())
        second = exchanged(exchanged(two) + 1)
        return exchanged(first @ x + masks), exchanged(second @ y)

    turns, _ = placed(program, X, X)
    assert turns == [0, 1, 3, 4, 2, 5, 6, 7, 8]


def test_layers_after_one_another_go_on_in_turns():
    turns, _ = placed(lambda x, y: (layer(layer(x)), layer(layer(y))), X, X)
    assert turns == [0, 1, 2, 8, 9, 10, 3, 11, 4, 5, 6, 12, 13, 14, 7, 15]


def test_what_is_made_of_all_parts_comes_behind_them():
    def program(x, y):
        one, two = layer(x), layer(y)
        return one, two, gathered(one + two)

    assert placed(program, X, X)[0] == [0, 1, 2, 4, 5, 6, 3, 7, 8]


@pytest.mark.parametrize(
    "program",
    [layer, lambda x: layer(x + exchanged(layer(x)))],
    ids=["one part", "parts that need one another"],
)
def test_one_part_keeps_its_levels(program):
    turns, levels = placed(program, X)
    assert turns == levels


def test_programs_of_other_products_are_told_apart():
    """Their collectives depend on one another alike, and are put in another order."""
    one_rank_group()
    programs = (layer, lambda x: exchanged(exchanged(gathered(x) @ x + exchanged(x.sum(0).long()))))
    found = [products(make_fx(p, tracing_mode="fake")(X).graph) for p in programs]
    assert [len(one) for one in found] == [2, 1]
