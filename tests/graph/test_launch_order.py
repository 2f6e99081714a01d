"""The structural order of collectives, rule by rule, and the legs of parts in turn."""

from functools import partial
from types import MappingProxyType

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.graph.launch_order import (
    collective_order,
    mark_region,
    order_by_parts,
    plan_launch_order,
    products,
)
from moe_compile.graph.precedence import find_predecessors
from moe_compile.graph.query import is_launch
from tests.scheduled_layers import c10d, one_rank_group

ROWS = [8]
ROWS_IN = torch.ones(16, 16)


def exchange(x):
    return c10d.wait_tensor(c10d.all_to_all_single(x, ROWS, ROWS, one_rank_group()))


def gather(x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 1, one_rank_group()))


def reduce(x):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", 1, one_rank_group()))


def add_up(x):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", one_rank_group()))


def order(program, *inputs, regions=MappingProxyType({}), **how):
    """Return the planned order as indices into the order of the program, and so are `regions`."""
    one_rank_group()
    graph = make_fx(program, tracing_mode="fake")(*inputs).graph
    for region, launches in regions.items():
        mark_region(
            [n for i, n in enumerate(filter(is_launch, graph.nodes)) if i in launches], region
        )
    planned = plan_launch_order(graph.nodes, find_predecessors(graph), **how)
    position = {node: i for i, node in enumerate(graph.nodes)}
    traced = sorted(planned, key=position.__getitem__)
    return [traced.index(launch) for launch in planned]


X = torch.ones(8, 8)


def test_all_dispatches_come_before_all_combines():
    def program(x):
        return sum(exchange(exchange(x + c) @ x) for c in range(3))

    assert order(program, X) == [0, 2, 4, 1, 3, 5]


def test_where_dependences_may_differ_only_all_to_alls_of_one_region_pass_one_another():
    def program(x, early):
        chunks = sum(exchange(exchange(x + c) @ x) for c in range(2))
        figures = add_up(chunks.sum()), add_up(early.sum())
        return (chunks, *figures, exchange(exchange(x * 2) @ x) + exchange(x * 3))

    assert order(program, X, X)[:4] == [0, 2, 6, 8]  # past the sums 4 and 5
    regions = {"first": range(4), "second": (6, 7, 8)}
    kept = order(program, X, X, regions=regions, keeps_program=True)
    assert kept == [0, 2, 1, 3, 4, 5, 6, 8, 7]
    assert order(program, X, X, keeps_program=True) == list(range(9))


def test_whether_one_region_needs_another_changes_no_kept_order():
    """A rank whose second region reads the first one's result stopped all ranks."""

    def chunks(x):
        return sum(exchange(exchange(x + c) @ x) for c in range(2))

    def program(needs, x):
        first = chunks(x)
        return first + chunks(x + first.mean() if needs else x * 2)

    regions = {"first": range(4), "second": range(4, 8)}
    kept = [
        order(partial(program, needs), X, regions=regions, keeps_program=True)
        for needs in (False, True)
    ]
    assert kept == [[0, 2, 1, 3, 4, 6, 5, 7]] * 2
    assert order(partial(program, False), X) != kept[0]


def test_combines_follow_the_order_of_what_they_wait_for():
    """Traced the other way round: the chunk that arrives first is sent back first."""

    def program(x):
        first, second = exchange(x), exchange(x + 1)
        back_second = exchange(second @ x)
        return exchange(first @ x) + back_second

    assert order(program, X) == [0, 1, 3, 2]


def test_a_gather_of_weights_is_launched_one_level_before_it_is_needed():
    """Not at the front with everything else that depends on inputs alone."""

    def program(x, shard):
        there = exchange(exchange(exchange(x) @ x) @ x)
        return exchange(there @ gather(shard))

    assert order(program, X, X + 1) == [0, 1, 3, 2, 4]


def test_a_gradient_reduction_does_not_hold_up_the_exchanges_below():
    """Its gradient is filler: the next layer's exchange is not to wait for it."""

    def program(x):
        upper = exchange(x)
        gradient = reduce(upper.t() @ x)
        lower = exchange(upper @ x)
        return exchange(lower @ x), gradient

    assert order(program, X) == [0, 2, 1, 3]


def test_a_launch_tied_to_no_other_stays_near_its_place():
    def program(x, shard):
        there = exchange(exchange(exchange(x) @ x) @ x)
        return there + gather(shard), exchange(there @ x)

    assert order(program, X, X + 1) == [0, 1, 3, 2, 4]


def test_signatures_hold_no_number_of_rows():
    def graph_of(rows):
        def program(x):
            return c10d.wait_tensor(c10d.all_to_all_single(x, [rows], [rows], one_rank_group()))

        return make_fx(program, tracing_mode="fake")(torch.ones(rows, 3)).graph

    one_rank_group()
    few, many = collective_order(graph_of(2)), collective_order(graph_of(64))
    assert few == many
    (group,) = few
    assert few[group] == ("all_to_all_single = _c10d_functional::all_to_all_single(float32[3])",)


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
    turns, levels = placed(lambda x, y: (layer(x), layer(y)), ROWS_IN, ROWS_IN)
    assert turns == [0, 1, 2, 4, 5, 6, 3, 7]
    assert levels == [0, 4, 1, 5, 2, 6, 3, 7]


def test_both_hops_of_a_way_are_one_leg():
    """The second comes once the next part's attention has begun, which the first runs under."""
    turns, _ = placed(lambda x, y: (hops(x), hops(y)), ROWS_IN, ROWS_IN)
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

    turns, _ = placed(program, ROWS_IN, ROWS_IN)
    assert turns == [0, 1, 3, 4, 2, 5, 6, 7, 8]


def test_layers_after_one_another_go_on_in_turns():
    turns, _ = placed(lambda x, y: (layer(layer(x)), layer(layer(y))), ROWS_IN, ROWS_IN)
    assert turns == [0, 1, 2, 8, 9, 10, 3, 11, 4, 5, 6, 12, 13, 14, 7, 15]


def test_what_is_made_of_all_parts_comes_behind_them():
    def program(x, y):
        one, two = layer(x), layer(y)
        return one, two, gathered(one + two)

    assert placed(program, ROWS_IN, ROWS_IN)[0] == [0, 1, 2, 4, 5, 6, 3, 7, 8]


@pytest.mark.parametrize(
    "program",
    [layer, lambda x: layer(x + exchanged(layer(x)))],
    ids=["one part", "parts that need one another"],
)
def test_one_part_keeps_its_levels(program):
    turns, levels = placed(program, ROWS_IN)
    assert turns == levels


def test_programs_of_other_products_are_told_apart():
    """Their collectives depend on one another alike, and are put in another order."""
    one_rank_group()
    programs = (layer, lambda x: exchanged(exchanged(gathered(x) @ x + exchanged(x.sum(0).long()))))
    found = [products(make_fx(p, tracing_mode="fake")(ROWS_IN).graph) for p in programs]
    assert [len(one) for one in found] == [2, 1]
