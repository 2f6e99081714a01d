"""Products in eight bits, chunked or not, equal a layer that quantises eagerly, bit for bit."""

import pytest
import torch

from moe_compile.testing.equivalence import differing_tensors
from tests.eight_bit_layers import FedByMessages, in_eight_bits
from tests.equivalence.test_layers import build, inputs, one_case
from tests.layers import FusedGateUp, GroupedExperts
from tests.slow_parameters import slow_but


def run_case(rank, case, style, recipe, gradient, options):
    torch._dynamo.reset()
    eager = in_eight_bits(style, recipe, gradient) if recipe else FedByMessages
    asked = {"megamoe.strict": True, "megamoe.chunks": case.chunks}
    asked |= {f"megamoe.{name}": value for name, value in options.items()}
    return differing_tensors(
        lambda: build(case, style), inputs(case, rank), asked, lambda: build(case, eager)
    )


def check(pool, case, style, recipe, gradient, options):
    for rank, differing in enumerate(pool.run(run_case, case, style, recipe, gradient, options)):
        assert not differing, f"rank {rank}: {differing}"


def a_case(style=GroupedExperts, **changes):
    """Widths are multiples of 16, as `rowwise` needs, and one of two is of more than one block."""
    sizes = {"width": 160, "hidden": 96, "num_experts": 8}
    return one_case(style, (9, 14), (16, 3), dtype=torch.bfloat16, **sizes, **changes)


FORMS = [
    (GroupedExperts, "blockwise", "e4m3", 2),
    (GroupedExperts, "rowwise", "e4m3", 3),
    (GroupedExperts, "blockwise", "e5m2", 4),
    (FusedGateUp, "rowwise", "bf16", 1),
]


@pytest.mark.parametrize(("style", "recipe", "gradient", "chunks"), slow_but(FORMS[:2], FORMS))
def test_every_format_in_any_number_of_chunks(two_devices, style, recipe, gradient, chunks):
    options = {
        "expert_compute": f"fp8_{recipe}",
        "expert_gradients": "same" if gradient == "bf16" else gradient,
    }
    check(two_devices, a_case(style, chunks=chunks), style, recipe, gradient, options)


@pytest.mark.parametrize("chunks", slow_but([2], [1, 2, 4]))
def test_rows_that_arrive_in_eight_bits_feed_products_as_they_came(two_devices, chunks):
    """And so do gradients of results, which arrive in eight bits as well."""
    wires = {"dispatch_wire": "fp8", "combine_wire": "fp8"}
    options = {"expert_compute": "fp8_blockwise", **wires}
    check(two_devices, a_case(chunks=chunks), GroupedExperts, None, None, options)
