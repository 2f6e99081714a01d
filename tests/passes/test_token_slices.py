"""The graph of experts that pick rows: slices in flight, weight gradients at once."""

import pytest
import torch

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.graph.query import is_launch, is_wait, overload_name
from moe_compile.report.exchanges import exchanges_of
from tests.capture import dynamo_graphs, state
from tests.picking_layers import ByMask, RoutedTogether, Searched
from tests.slow_parameters import slow_but

WIDTH, HIDDEN, LOCAL, TOP_K, TOKENS = 64, 64, 2, 2, 256
PRODUCTS = 2
"""Of one expert."""


def traced(style, group, num_slices=2, **options):
    """Return the forward and the backward graph after every pass, and the report."""
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    layer = style(WIDTH, HIDDEN, LOCAL, TOP_K, group).bfloat16()
    (gm,) = dynamo_graphs(layer, x)
    asked = {"chunks": num_slices, "chunk_by": "tokens", "max_memory_increase": 2.0, **options}
    compile_state, compilation = rewrite(gm, state(**asked).config)
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    return [m.graph for m in trace_both(gm, inputs, compile_state)], compilation


def kinds(graph, width=WIDTH):
    """Return names of what moves rows of tokens, in graph order, and the products."""
    found = []
    for node in graph.nodes:
        value = node.meta.get("val")
        is_rows = isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == width
        if is_launch(node) and is_rows:
            found.append(overload_name(node).rpartition("::")[2].removesuffix("_tensor"))
        elif overload_name(node) == "aten::mm":
            found.append("mm")
    return found


@pytest.mark.parametrize("num_slices", slow_but([2], (2, 4)))
def test_each_slice_is_gathered_and_reduced_by_itself_both_ways(fake_ranks, num_slices):
    (forward, backward), _ = traced(Searched, fake_ranks, num_slices)
    for graph in (forward, backward):
        launched = kinds(graph)
        assert launched.count("all_gather_into") == num_slices
        assert launched.count("reduce_scatter") == num_slices


@pytest.mark.parametrize("num_slices", slow_but([2], (2, 4)))
def test_a_weight_has_one_product_for_its_gradient_however_many_slices(fake_ranks, num_slices):
    (forward, backward), _ = traced(Searched, fake_ranks, num_slices)
    router = 1
    assert kinds(forward).count("mm") == LOCAL * PRODUCTS * num_slices + router
    assert kinds(backward).count("mm") == LOCAL * PRODUCTS * (num_slices + 1) + 2 * router


def test_a_slice_travels_under_the_products_of_another(fake_ranks):
    (forward, backward), _ = traced(Searched, fake_ranks, schedule=True, hardware="cpu")
    launched = kinds(forward)
    assert "mm" in launched[launched.index("reduce_scatter") :]
    assert _under_products(forward, "reduce_scatter") and _under_products(backward, "all_gather")


def test_slices_but_the_first_are_gathered_behind_the_routing(fake_ranks):
    """Else what the host reads of the routing would wait for all of them."""
    (forward, _), _ = traced(Searched, fake_ranks, 4, schedule=False)
    gathers = [n for n in forward.nodes if is_launch(n) and "all_gather" in overload_name(n)]
    widths = [gather.meta["val"].shape[1] for gather in gathers]
    assert widths == [WIDTH, TOP_K, TOP_K, WIDTH, WIDTH, WIDTH]


def _under_products(graph, name):
    """Whether a product of this graph runs between some launch of this name and its wait."""
    nodes = list(graph.nodes)
    for launch in filter(is_launch, nodes):
        wait = next(user for user in launch.users if is_wait(user))
        between = nodes[nodes.index(launch) : nodes.index(wait)]
        if name in overload_name(launch) and any(overload_name(n) == "aten::mm" for n in between):
            return True
    return False


def test_tokens_that_others_read_too_are_gathered_at_once(fake_ranks):
    (forward, backward), compilation = traced(RoutedTogether, fake_ranks)
    assert kinds(forward).count("all_gather_into") == 1
    assert kinds(forward).count("reduce_scatter") == 2
    assert kinds(backward).count("all_gather_into") == 2
    (region,) = compilation.regions
    assert any("gathered at once" in remark for remark in region.remarks)


def test_the_report_says_what_it_is(fake_ranks):
    _, compilation = traced(Searched, fake_ranks)
    (region,) = compilation.regions
    assert (region.verdict, region.num_chunks, region.sized_by) == ("chunked", 2, "gather")
    assert region.num_host_reads == LOCAL + 1  # a search for each expert, and one for all slices
    _, compilation = traced(ByMask, fake_ranks)
    (masked,) = compilation.regions
    assert masked.num_host_reads == 2 * LOCAL + 1  # of each mask also for the scores, as written
    (exchange,) = (e for e in exchanges_of(compilation) if e.is_found)
    assert exchange.what == (
        "gather and sums of tokens, 2 experts on each of 2 ranks; runs in 2 chunks"
    )
