"""Rows in eight bits over two hops: the bits of the flat exchange, and bounds of sums on nodes."""

import pytest
import torch

from moe_compile.ops.wire_format import BLOCK
from moe_compile.plan.node_rounding import NodeRounding
from moe_compile.testing.equivalence import differing_tensors
from moe_compile.testing.strategies import RoutingPattern
from tests.dispatch_layers import (
    Around,
    InOrder,
    InOrderWeighted,
    OntoTokens,
    SharedInOrder,
    SharedInOrderWeighted,
    Unweighted,
)
from tests.equivalence.test_layers import build, inputs
from tests.equivalence.test_sums_on_nodes import (
    beside_eager,
    in_the_order_stated,
    sums,
    terms,
)
from tests.equivalence.test_two_hops import (
    EMPTY,
    NODES,
    OPTIONS,
    TOKENS,
    a_case,
    check,
    check_bytes,
    two_nodes,  # noqa: F401  (a fixture)
)
from tests.hop_wire_layers import flat_eagerly, hops_eagerly, in_eight_bits
from tests.layers import GroupedExperts
from tests.node_ranks import in_two_hops, seat
from tests.slow_parameters import exhaustive_but

BOTH = ("fp8", "fp8")


@pytest.fixture
def fresh_nodes(two_nodes):  # noqa: F811
    """Two nodes of two ranks that have run nothing: programs of one place have one plan."""
    two_nodes.regroup()
    two_nodes.run(seat, NODES)
    return two_nodes


def asked(wires, **options):
    dispatch, combine = wires
    options = {"dispatch_wire": dispatch, "combine_wire": combine, **options}
    return {**OPTIONS, **{f"megamoe.{name}": value for name, value in options.items()}}


def differing(rank, case, style, reference, wires, options):
    torch._dynamo.reset()
    with in_two_hops(options.get("chunks", 1)) as left:
        found = differing_tensors(
            lambda: build(case, style),
            inputs(case, rank),
            asked(wires, **options),
            lambda: build(case, reference(style, *wires)),
        )
    return [*found, *left]


def equals(pool, case, style, reference, wires, **options):
    check(pool.run(differing, case, style, reference, wires, options))


# --- the bits of the flat exchange ---------------------------------------------------------------


class WideSums(Unweighted):
    """Tokens' rows are added up as they come, in float32."""

    def total(self, x, order, out, scores):
        return super().total(x.float(), order, out.float(), scores)


FLAT = (
    (Unweighted, BOTH),
    (Around, ("fp8", "fp8_forward")),
    (WideSums, ("fp8", "fp8")),
    (InOrder, ("same", "fp8")),
    (SharedInOrder, ("same", "fp8")),
)
"""Styles and wires for which nothing weights rows between packing and the sums."""


@pytest.mark.parametrize(("style", "wires"), exhaustive_but(FLAT[1:3], FLAT))
def test_rows_that_nothing_weights_are_those_of_the_flat_exchange(fresh_nodes, style, wires):
    """Uneven ranks; outputs and all gradients, bit for bit."""
    equals(fresh_nodes, a_case(style, TOKENS), style, flat_eagerly, wires)


# --- rows that are weighted ----------------------------------------------------------------------

WEIGHTED = (
    (InOrder, BOTH),
    (Around, BOTH),
    (InOrderWeighted, BOTH),
    (OntoTokens, ("same", "fp8")),
    (SharedInOrderWeighted, BOTH),
    (InOrder, ("fp8_forward", "same")),
)


@pytest.mark.parametrize(("style", "wires"), exhaustive_but(WEIGHTED[1:4], WEIGHTED))
def test_weights_meet_tokens_that_were_packed_and_gradients_too(fresh_nodes, style, wires):
    """Packed is what is copied: the token, not its weighted row, and the gradient of its sum."""
    equals(fresh_nodes, a_case(style, TOKENS), style, hops_eagerly, wires)


IN_PARTS = (
    (Unweighted, "experts", 2),
    (InOrder, "tokens", 3),
    (InOrderWeighted, "experts", 3),
    (Around, "tokens", 2),
)


@pytest.mark.parametrize(("style", "axis", "num_parts"), exhaustive_but(IN_PARTS[:2], IN_PARTS))
def test_parts_change_no_bit(fresh_nodes, style, axis, num_parts):
    case = a_case(style, EMPTY, num_experts=12, routing=RoutingPattern.SKEWED)
    options = {"chunks": num_parts, "chunk_by": axis}
    equals(fresh_nodes, case, style, hops_eagerly, BOTH, **options)


# --- sums on the nodes ---------------------------------------------------------------------------


def largest(values):
    """Return the largest magnitude of the block of 128 columns that a number is in."""
    blocks = values.abs().split(BLOCK, dim=1)
    return torch.cat([block.amax(1, keepdim=True).expand_as(block) for block in blocks], 1)


def wrong_sums(tensors, kept, case, style, num_nodes):
    values = dict(zip(("output", "input"), terms(style, kept), strict=True))
    rounding = NodeRounding(
        num_addends=case.top_k, dtype=case.dtype, gradient_bound_eps=0, in_eight_bits=("results",)
    )
    left = []
    for name, tensor in tensors.items():
        exact, magnitude = sums(values[name], kept, case)
        of_blocks, _ = sums(largest(values[name]), kept, case)
        bound = rounding.bound_in_eight_bits * magnitude + rounding.bound_of_blocks * of_blocks
        error = (tensor.double() - exact).abs()
        if (error > bound).any():
            left.append(f"{name}: {(error / bound).max():.2f} of the bound")
        rounded = values[name].float().to(case.dtype)
        stated = in_the_order_stated(rounded, kept, case, num_nodes, packed=in_eight_bits)
        if not torch.equal(tensor, stated):
            left.append(f"{name}: in another order")
    return left


def beyond_bound(rank, case, style, wires):
    """Return which sums and gradients of a compiled step are not as they should be."""
    eager, options = hops_eagerly(style, *wires, rounds=True), asked(wires, nodes="rounded")
    left, tensors, kept = beside_eager(rank, case, eager, style, options)
    return left + wrong_sums(tensors, kept, case, style, NODES)


SIZES = ((6, 16), (3, 160))
BOUNDED = [(style, *sizes) for style in (InOrder, Around, InOrderWeighted) for sizes in SIZES]


@pytest.mark.parametrize(("style", "top_k", "width"), exhaustive_but(BOUNDED[1:3], BOUNDED))
def test_sums_on_nodes_stay_within_the_bound(fresh_nodes, style, top_k, width):
    """And are packed as stated: rows inside the node, then the sums of nodes."""
    case = a_case(style, TOKENS, top_k=top_k, width=width)
    check(fresh_nodes.run(beyond_bound, case, style, BOTH))


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["exact", "rounded"])
def test_a_message_crosses_to_a_node_once(fresh_nodes, nodes):
    """As many rows as in the model's format, each of `row_bytes`; nothing else changes."""
    case = a_case(GroupedExperts, (40, 33, 21, 50))
    check_bytes(fresh_nodes, NODES, case, asked(BOTH, nodes=nodes))
