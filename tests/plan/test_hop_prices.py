"""What two hops are predicted to take, and when they are chosen."""

import dataclasses
import itertools
from collections import Counter

import pytest

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.hop_shape import INDEX_KERNELS, PLACE_KERNELS, HopShape
from moe_compile.cost.rates import Rates
from moe_compile.hardware import HardwareProfile, Link
from moe_compile.plan.candidates import Candidate, list_candidates
from moe_compile.plan.choose_plan import choose_plan, extra_bytes
from moe_compile.plan.decide import TwoHops, experts_rule, wires_tried
from moe_compile.plan.node_rounding import NodeRounding
from moe_compile.plan.region_tasks import price_us, tasks_of
from tests.plan.test_choose_plan import region

ROW = 1000.0
SHAPE = HopShape(num_nodes=2, num_local=4, num_experts=64, rows_per_token=8, row_bytes=ROW)
FAST_NODE = Link(num_ranks=8, gb_per_s=4.0, latency_us=0.0)


def profile(network=1.0, node=FAST_NODE, memory=1e6, overhead=0.0):
    return HardwareProfile(
        name="by hand",
        matmul_tflops=1.0,
        memory_gb_per_s=memory,
        op_overhead_us=overhead,
        link_gb_per_s=network,
        link_latency_us=0.0,
        node=node,
    )


def rates(**changes):
    return Rates.of(profile(**changes), 8, SHAPE.num_local)


@pytest.mark.parametrize(
    ("nodes", "experts", "k"), [(2, 8, 2), (2, 8, 5), (4, 8, 3), (2, 6, 6), (4, 12, 1)]
)
def test_nodes_of_a_token_are_those_of_all_choices(nodes, experts, k):
    shape = HopShape(
        num_nodes=nodes, num_local=1, num_experts=experts, rows_per_token=k, row_bytes=ROW
    )
    choices = [*itertools.combinations(range(experts), k)]
    hit = [len({e * nodes // experts for e in chosen}) for chosen in choices]
    assert shape.nodes_per_token == pytest.approx(sum(hit) / len(hit))
    away = [len({e * nodes // experts for e in chosen} - {0}) for chosen in choices]
    assert shape.hop_rows == pytest.approx(sum(away) / len(away))
    rows = [sum(e * nodes // experts != 0 for e in chosen) for chosen in choices]
    assert shape.flat_rows == pytest.approx(sum(rows) / len(rows))


SENT = 140e3
"""Bytes of a rank's rows that leave it, of 160e3, in each exchange of `in_hops`."""


def in_hops(**changes):
    """Return work with exchanges of 140 us on a link of 1 GB/s, experts of 100 us."""
    return dataclasses.replace(region(link_us=SENT / 1e3, row_bytes=160e3, **changes), hops=SHAPE)


def test_a_price_is_that_of_the_exchanges_one_hop_after_the_other():
    """160 rows of 20 tokens: flat 4/7 of 140 us between nodes and nothing of a node's link counts;
    in hops each token crosses once in half of the cases, and 3/4 of its rows stay in the node."""
    work, by = in_hops(), rates()
    d = SHAPE.nodes_per_token
    flat = 4 / 7 * SENT / 1e3
    across, inside = 20 * d / 2 * ROW / 1e3, 0.75 * 160 * ROW / 4e3
    masks, scores = 20 * d / 2 * 4 / 1e3, 4 / 7 * 160 * 7 / 8 * 4 / 1e3
    rest = 2 * (1 + 100 + 1)
    told = masks + scores
    prices = [price_us(work, Candidate(nodes=nodes), by) for nodes in ("off", "exact", "rounded")]
    expected = [
        rest + 4 * flat,
        rest + 2 * flat + 2 * (across + inside) + told,
        rest + 4 * (across + inside) + told + scores,
    ]
    assert prices == pytest.approx(expected, rel=1e-3)  # rows are moved in memory as well


def test_rows_are_moved_and_indices_found():
    slow = rates(memory=1.0, overhead=1.0)
    free = rates(memory=1e9, overhead=0.0)
    work, far = in_hops(), 20 * SHAPE.nodes_per_token * ROW

    def more(nodes):
        added = [price_us(work, Candidate(nodes=n), slow) for n in (nodes, "off")]
        without = [price_us(work, Candidate(nodes=n), free) for n in (nodes, "off")]
        return added[0] - added[1] - (without[0] - without[1])

    copied = 2 * far + 2 * 160 * ROW  # the flat gather, of tokens to rows, is taken off
    launches = 3 + 2  # kernels that move rows, launches, of a copy in two hops; flat it is one
    assert more("exact") == pytest.approx(
        2 * copied / 1e3 + INDEX_KERNELS + 1 + 2 * (launches - 1), rel=2e-3
    )
    summed = 3 * 160 * ROW + 2 * far + 20 * ROW
    assert more("rounded") == pytest.approx(
        2 * (copied + summed) / 1e3 + INDEX_KERNELS + PLACE_KERNELS + 2 + 4 * (launches - 1),
        rel=2e-3,
    )


EIGHT = {"dispatch_wire": "fp8", "combine_wire": "fp8"}
SHARE = 0.52
"""Of a row in eight bits, of the bytes of one of bfloat16."""


def test_in_eight_bits_each_hop_sends_a_share_of_its_bytes():
    """Masks and scores go as they are; what "exact" sends flat is smaller as well."""
    work, by = in_hops(wires={"fp8": SHARE}), rates()
    flat = SHARE * 4 / 7 * SENT / 1e3
    across = SHARE * 20 * SHAPE.nodes_per_token / 2 * ROW / 1e3
    inside = SHARE * 0.75 * 160 * ROW / 4e3
    masks, scores = 20 * SHAPE.nodes_per_token / 2 * 4 / 1e3, 4 / 7 * 160 * 7 / 8 * 4 / 1e3
    rest = 2 * (1 + 100 + 1)
    ways = [Candidate(nodes=nodes, **EIGHT) for nodes in ("exact", "rounded")]
    expected = [
        rest + 2 * flat + 2 * (across + inside) + masks + scores,
        rest + 4 * (across + inside) + masks + 2 * scores,
    ]
    assert [price_us(work, way, by) for way in ways] == pytest.approx(expected, rel=1e-3)


def test_one_wire_is_of_one_exchange_and_rows_forward_leave_gradients():
    work, by = in_hops(wires={"fp8": SHARE}), rates()
    whole = price_us(work, Candidate(nodes="rounded"), by)
    both = price_us(work, Candidate(nodes="rounded", **EIGHT), by)
    for wires, share in (
        ({"dispatch_wire": "fp8"}, 1 / 2),
        ({"combine_wire": "fp8"}, 1 / 2),
        ({"dispatch_wire": "fp8_forward"}, 1 / 4),
        ({"dispatch_wire": "fp8_forward", "combine_wire": "fp8"}, 3 / 4),
    ):
        us = price_us(work, Candidate(nodes="rounded", **wires), by)
        assert (whole - us) / (whole - both) == pytest.approx(share, rel=1e-2), wires


def moved(way, **changes):
    """Return what way moves in memory beside the flat exchange, in bytes, and its kernels."""
    work = in_hops(wires={"fp8": SHARE}, **changes)
    free = rates(memory=1e9)

    def beside(by):
        plain = Candidate(num_chunks=way.num_chunks)
        of_links = [price_us(work, one, free) for one in (way, plain)]
        us = [price_us(work, one, by) for one in (way, plain)]
        return us[0] - us[1] - (of_links[0] - of_links[1])

    return beside(rates(memory=1.0)) * 1e3, beside(rates(memory=1e9, overhead=1.0))


def test_a_row_is_packed_once_where_it_is_copied_and_twice_where_it_is_summed():
    """Copied: tokens packed, messages moved, unpacked, less the flat gather. Summed: packed, then
    unpacked on the node and read; sums of nodes written, packed, unpacked at home and read; less
    the sum of the flat rows."""
    rows, far = 160 * ROW, 20 * SHAPE.nodes_per_token * ROW
    flat = 2 * (1 + SHARE) * SENT
    copied = 2 * SHARE * (far + rows)
    summed = 2 * (1 + SHARE) * (rows + far) + 2 * far
    exact, exact_kernels = moved(Candidate(nodes="exact", **EIGHT))
    assert exact == pytest.approx(2 * copied + 2 * flat, rel=2e-3)
    rounded, rounded_kernels = moved(Candidate(nodes="rounded", **EIGHT))
    assert rounded == pytest.approx(2 * copied + 2 * summed, rel=2e-3)
    found = INDEX_KERNELS + PLACE_KERNELS + 2
    assert rounded_kernels == pytest.approx(found + 4 * (3 + 2 - 1) + 2 * 3, rel=2e-2)
    assert exact_kernels == pytest.approx(INDEX_KERNELS + 1 + 2 * (3 + 2 - 1) + 2 * 2, rel=2e-2)


def test_registered_nodes_say_which_ranks_share_a_link():
    """The profile's node has room for all eight; the job says that it has four."""
    assert Rates.of(profile(), 8).link_us(SENT) == pytest.approx(SENT / 4e3)
    assert rates().link_us(SENT) == pytest.approx(4 / 7 * SENT / 1e3)
    one_link = Rates.of(profile(node=None), 8, 4)
    assert one_link.link_us(SENT) == one_link.hop_us(SENT, within=True) == SENT / 1e3


BOUNDED = NodeRounding(num_addends=8, dtype=None, gradient_bound_eps=0)
UNBOUNDED = NodeRounding(num_addends=8, dtype=None, gradient_bound_eps=None)


def decided(by, **asked):
    """Return the form that the planner chooses, by what the options allow."""
    return chosen(by, **asked).nodes


def chosen(by, *, exact=True, rounding=BOUNDED, weighted=(), kept=(), wires=(), **options):
    """Return what it chooses."""
    settings = {"equal_tokens": True, "nodes": "auto", "chunks": 1, **options}
    config = MegaMoEConfig(**settings)
    work = dataclasses.replace(in_hops(wires=wires), never_packed=frozenset(kept))
    two_hops = TwoHops(
        shape=SHAPE, can_be_exact=exact, rounding=rounding, weighted=frozenset(weighted)
    )
    rule = experts_rule(config, work, None, two_hops)
    candidates = list_candidates(work, ("experts", "tokens"), wires_tried(config))
    return choose_plan(work, by, candidates, rule).chosen.candidate


def test_auto_takes_exact_hops_where_the_network_is_what_counts():
    assert decided(rates(network=0.5)) == "exact"


def test_auto_takes_sums_on_the_nodes_as_numerics_allow():
    assert decided(rates(network=0.5), numerics="bounded") == "rounded"
    assert decided(rates(network=0.5), numerics="bounded", rounding=UNBOUNDED) == "exact"
    assert decided(rates(network=0.5), numerics="lossy", rounding=UNBOUNDED) == "rounded"
    assert decided(rates(network=0.5), numerics="bounded", exact=False) == "rounded"
    assert decided(rates(network=0.5), exact=False) == "off"


@pytest.mark.parametrize(
    ("why", "by"),
    [
        ("the network is as fast as a node", rates(network=4.0)),
        ("a node's link is what counts", rates(node=dataclasses.replace(FAST_NODE, gb_per_s=0.5))),
        ("launches are dear", rates(network=0.5, overhead=100.0)),
    ],
)
def test_auto_keeps_the_all_to_all_where_hops_gain_nothing(why, by):
    assert decided(by, numerics="bounded") == "off", why


WIRES = ("dispatch_wire", "combine_wire")


@pytest.mark.parametrize(
    ("numerics", "expected"),
    [
        ("exact", ("exact", "same", "same")),
        ("bounded", ("rounded", "same", "same")),
        ("lossy", ("rounded", "fp8", "fp8")),
    ],
)
def test_nodes_and_number_format_are_chosen_together(numerics, expected):
    found = chosen(
        rates(network=0.1),
        wires={"fp8": SHARE},
        numerics=numerics,
        chunks="auto",
        **dict.fromkeys(WIRES, "auto"),
    )
    assert (found.nodes, found.dispatch_wire, found.combine_wire) == expected


def test_rows_that_must_not_be_rounded_go_in_hops_as_they_are():
    options = {"wires": {"fp8": SHARE}, "numerics": "lossy", **dict.fromkeys(WIRES, "auto")}
    one = chosen(rates(network=0.1), kept=("combine",), **options)
    assert (one.nodes, one.dispatch_wire, one.combine_wire) == ("rounded", "fp8", "same")


@pytest.mark.parametrize(
    ("numerics", "weighted", "expected"),
    [
        ("exact", (), "exact"),
        ("exact", ("combine",), "off"),
        ("bounded", ("dispatch",), "off"),
        ("bounded", (), "exact"),
        ("lossy", ("dispatch", "combine"), "rounded"),
    ],
)
def test_rows_that_a_wire_names_take_hops_that_pack_the_same_or_where_all_is_allowed(
    numerics, weighted, expected
):
    """Sums of nodes are packed again; a token in place of its weighted row is another message."""
    by = rates(network=0.1)
    options = {"wires": {"fp8": SHARE}, "numerics": numerics, **dict.fromkeys(WIRES, "fp8")}
    found = chosen(by, weighted=weighted, **options)
    assert (found.nodes, found.dispatch_wire, found.combine_wire) == (expected, "fp8", "fp8")


@pytest.mark.parametrize("options", [{"nodes": "off"}, {"chunks": 2, "chunk_by": "tokens"}])
def test_what_two_hops_do_not_have_is_not_given_up_for_them(options):
    assert decided(rates(network=0.1), numerics="bounded", **options) == "off"


def test_parts_that_are_asked_for_are_the_only_ones():
    slow = rates(network=0.1)
    for chunks, slices in itertools.product((1, 2, 4), (1, 2)):
        one = chosen(slow, chunks=chunks, hop_slices=slices)
        assert (one.nodes, one.num_chunks, one.hop_slices) == ("exact", chunks, slices)


def test_the_form_that_is_asked_for_is_the_only_one_and_its_parts_go_by_price():
    """Where the network is fast nothing gains over the flat exchange, which was not asked for."""
    assert chosen(rates(network=4.0), nodes="rounded", chunks="auto").nodes == "rounded"
    one = chosen(rates(network=0.5), nodes="exact", chunks="auto", numerics="lossy")
    assert one.nodes == "exact" and one.num_chunks > 1


def test_each_hop_is_in_its_parts_and_masks_go_with_each_slice():
    way = Candidate(nodes="exact", num_chunks=4, hop_slices=2)
    forward, _ = tasks_of(in_hops(num_parts=4), way, rates())
    counted = Counter(" ".join(task.name.split()[:2]) for task in forward)
    counted = {name: counted[name] for name in ("masks", "rows 1", "hop 1", "rows 2", "hop 2")}
    assert counted == {"masks": 2, "rows 1": 1, "hop 1": 2, "rows 2": 2, "hop 2": 8}


def test_hop_2_of_a_slice_goes_while_hop_1_of_the_next_does():
    """As long as it lasts itself, half of it is hidden each time, on links of two streams."""
    work, by = in_hops(), rates(memory=1e9)
    us = [price_us(work, Candidate(nodes="rounded", hop_slices=n), by) for n in (1, 2)]
    inside = 0.75 * 160 * ROW / 4e3
    across = 20 * SHAPE.nodes_per_token / 2 * ROW / 1e3
    assert us[0] - us[1] == pytest.approx(4 * min(inside, across) / 2, rel=1e-2)
    one_link = Rates.of(profile(node=None, memory=1e9), 8, SHAPE.num_local)
    us = [price_us(work, Candidate(nodes="rounded", hop_slices=n), one_link) for n in (1, 2)]
    assert us[0] == pytest.approx(us[1], rel=1e-2)


def test_what_copies_is_hidden_by_chunk_and_sums_wait_for_all_chunks():
    """Forward in two chunks: hop 2 and home of one chunk beside experts of the other."""
    work = dataclasses.replace(in_hops(), backward=())
    by, inside = rates(memory=1e9), 0.75 * 160 * ROW / 4e3
    flat = 4 / 7 * SENT / 1e3
    exact, rounded = (
        [price_us(work, Candidate(nodes=n, num_chunks=c), by) for c in (1, 2)]
        for n in ("exact", "rounded")
    )
    assert exact[0] - exact[1] == pytest.approx(inside / 2 + min(flat, 100) / 2, rel=1e-2)
    assert rounded[0] - rounded[1] == pytest.approx(inside / 2 + inside / 2, rel=1e-2)


def test_hops_hold_the_rows_of_hop_1_and_a_chunk_of_hop_2_more():
    work, far = in_hops(), SHAPE.nodes_per_token / 8
    whole, chunked = (
        extra_bytes(work, Candidate(nodes="exact", num_chunks=n))
        - extra_bytes(work, Candidate(num_chunks=n))
        for n in (1, 4)
    )
    assert whole == pytest.approx(160e3 * (1 + far))
    assert chunked == pytest.approx(160e3 * (1 / 4 + far))
