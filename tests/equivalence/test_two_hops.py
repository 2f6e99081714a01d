"""Rows that come in two hops: eager's bits, and a token that crosses to a node once."""

import pytest
import torch

from moe_compile.ops.wire_format import row_bytes as message_bytes
from moe_compile.testing.equivalence import differing_tensors
from moe_compile.testing.strategies import RoutingPattern
from tests.dispatch_layers import (
    Around,
    InOrder,
    InOrderWeighted,
    OntoTokens,
    SharedByIndex,
    SharedInOrder,
    SharedInOrderWeighted,
)
from tests.equivalence.test_layers import build, inputs, one_case
from tests.layers import GroupedExperts, LoopExperts, SegmentStarts, SharedAndBias
from tests.node_ranks import BytesBetweenNodes, in_two_hops, seat
from tests.slow_parameters import exhaustive_but

OPTIONS = {"megamoe.nodes": "exact", "megamoe.strict": True, "megamoe.codegen": "fx"}
TOKENS = (9, 14, 5, 7)
NODES = 2
BY_INDEX = (GroupedExperts, LoopExperts, SegmentStarts, SharedAndBias, Around)


@pytest.fixture(scope="module")
def two_nodes(four_ranks):
    """Four ranks, two to a node."""
    four_ranks.run(seat, NODES)
    return four_ranks


def check(results):
    for rank, found in enumerate(results):
        assert not found, f"rank {rank}: {found}"


def a_case(style, *tokens, **changes):
    """Return a case of two experts a rank; three rows a token."""
    known = style if style in (GroupedExperts, LoopExperts, SegmentStarts) else GroupedExperts
    more = {
        "num_experts": 2 * len(tokens[0]),
        "top_k": 3,
        "routing": RoutingPattern.BALANCED,
        **changes,
    }
    return one_case(known, *tokens, **more)


def differing(rank, case, style, **options):
    torch._dynamo.reset()
    asked = {**OPTIONS, **{f"megamoe.{name}": value for name, value in options.items()}}
    with in_two_hops(options.get("chunks", 1)) as left:
        found = differing_tensors(lambda: build(case, style), inputs(case, rank), asked)
    return [*found, *left]


@pytest.mark.parametrize(
    "style",
    exhaustive_but(
        (LoopExperts, InOrder, OntoTokens), (*BY_INDEX, InOrder, InOrderWeighted, OntoTokens)
    ),
)
def test_no_bit_changes_whatever_the_style(two_nodes, style):
    """Weights of rows before the experts or after them, counts in any form, bf16 and fp32."""
    check(two_nodes.run(differing, a_case(style, TOKENS), style))


EMPTY = (6, 0, 11, 3)


@pytest.mark.parametrize(
    "routing",
    exhaustive_but(
        [RoutingPattern.SKEWED], list(RoutingPattern), quick=[RoutingPattern.FIRST_RANK]
    ),
)
def test_ranks_without_tokens_and_without_rows(two_nodes, routing):
    """Experts of rank 0 take everything: three ranks have no row, and one node has none."""
    case = a_case(GroupedExperts, EMPTY, top_k=2, routing=routing)
    check(two_nodes.run(differing, case, GroupedExperts))


PARTS = (SharedInOrderWeighted, SharedInOrder, SharedByIndex)


@pytest.mark.parametrize("style", exhaustive_but(PARTS[:1], PARTS))
def test_ranks_that_send_the_rows_of_one_half_of_their_tokens(two_nodes, style):
    """One rank has one token, and no row; the last token of an odd number has none."""
    check(two_nodes.run(differing, a_case(GroupedExperts, (6, 1, 11, 4)), style))


def cut_by(axis):
    """Return options that cut by experts, by tokens, or hop 1 by tokens and what follows by
    experts."""
    return {"hop_slices": 3} if axis == "both" else {"chunk_by": axis}


# --- bytes -----------------------------------------------------------------------------------


def sent_between_nodes(rank, case, num_nodes, options):
    """Return what a compiled step sends to other nodes, and what its tokens choose."""
    torch._dynamo.reset()
    layer = build(case, GroupedExperts)
    ((x, gradient),) = inputs(case, rank)
    with torch.no_grad():
        chosen = layer.route(x)[1]
    compiled = torch.compile(layer, backend="megamoe", fullgraph=True, options=options)
    x = x.requires_grad_()
    compiled(x).backward(gradient)  # what ranks compare before the first run is not counted
    with BytesBetweenNodes(rank, num_nodes) as forward:
        output = compiled(x)
    with BytesBetweenNodes(rank, num_nodes) as backward:
        output.backward(gradient)
    return (forward.sent, backward.sent), chosen


def formula(case, chosen, rank, num_nodes):
    """Return a rank's pairs (token, other node), its pairs (token, expert of another node), and of
    tokens of other nodes the rows that its own experts have, and those that cross to it."""
    local, experts = case.num_ranks // num_nodes, case.num_experts // case.num_ranks
    own, nodes = rank // local, [of_rank // (experts * local) for of_rank in chosen]
    once = sum(len({*row} - {own}) for row in nodes[rank].tolist())
    others = [r for r in range(case.num_ranks) if r // local != own]
    home = sum(int((chosen[r] // experts == rank).sum()) for r in others)
    came = sum(own in row for r in others if r % local == rank % local for row in nodes[r].tolist())
    return once, int((nodes[rank] != own).sum()), home, came


def check_bytes(pool, num_nodes, case, options=OPTIONS):
    results = pool.run(sent_between_nodes, case, num_nodes, options)
    chosen = [of_rank for _, of_rank in results]
    saved, rounds = 0, options["megamoe.nodes"] == "rounded"
    for rank, ((forward, backward), _) in enumerate(results):
        once, flat, home, came = formula(case, chosen, rank, num_nodes)
        rows, factor = (torch.bfloat16, case.width), (torch.bfloat16, 1)
        if options.get("megamoe.dispatch_wire") == options.get("megamoe.combine_wire") == "fp8":
            rows = torch.uint8, message_bytes(case.width)
        row_bytes = rows[0].itemsize * rows[1]
        local = case.num_ranks // num_nodes
        told = case.num_experts // case.num_ranks + local + 1
        if num_parts := options.get("megamoe.chunks"):
            by_experts = options["megamoe.chunk_by"] == "experts"
            told = told + (num_parts - 1) * local if by_experts else told * num_parts
        back = came if rounds else home
        assert forward == {
            (torch.int32, told): 4 * told * (case.num_ranks - local),
            (torch.int32, 1): 4 * once,
            factor: 2 * flat,
            rows: row_bytes * (once + back),
        }
        of_weights = {factor: 2 * home} if rounds else {}
        assert backward == {rows: row_bytes * (once + back), **of_weights}
        saved += flat + home - once - back
    assert saved > 0


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["", "experts", "tokens"])
def test_a_token_crosses_to_a_node_once(two_nodes, axis):
    """Forward once for each node it needs, and back as many rows as the model sends; the gradient
    of the combine likewise. Beside that the table, a mask of four bytes, and weights of rows. In
    parts no more, but for the table."""
    asked = {"megamoe.chunk_by": axis, "megamoe.chunks": 2} if axis else {}
    check_bytes(two_nodes, NODES, a_case(GroupedExperts, (40, 33, 21, 50)), {**OPTIONS, **asked})


# --- more nodes ------------------------------------------------------------------------------


@pytest.mark.slow
def test_four_nodes_of_one_rank(two_nodes):
    """Two experts a rank: a token goes to a rank once where it chooses both."""
    two_nodes.regroup()  # programs of one place would have two plans, and run as written
    two_nodes.run(seat, 4)
    try:
        check(two_nodes.run(differing, a_case(GroupedExperts, TOKENS, top_k=5), GroupedExperts))
        check_bytes(two_nodes, 4, a_case(GroupedExperts, TOKENS, top_k=5))
    finally:
        two_nodes.regroup()
        two_nodes.run(seat, NODES)
