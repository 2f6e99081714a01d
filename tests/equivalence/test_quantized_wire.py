"""The quantised wire, chunked or not, equals a layer that quantises eagerly, bit for bit."""

import math

import pytest
import torch
import torch.distributed as dist

from moe_compile.testing.equivalence import differing_tensors
from tests.equivalence.test_layers import build, inputs, one_case
from tests.layers import GroupedExperts
from tests.quantized_layers import quantized_eagerly
from tests.slow_parameters import exhaustive_but, slow_but

WIRES = (("fp8", "same"), ("same", "fp8"), ("fp8", "fp8"), ("fp8_forward", "fp8_forward"))


def run_case(rank, case, style, dispatch_wire, combine_wire):
    torch._dynamo.reset()
    options = {
        "megamoe.chunks": case.chunks,
        "megamoe.strict": True,
        "megamoe.dispatch_wire": dispatch_wire,
        "megamoe.combine_wire": combine_wire,
    }
    eager = quantized_eagerly(style, dispatch_wire, combine_wire)
    return differing_tensors(
        lambda: build(case, style), inputs(case, rank), options, lambda: build(case, eager)
    )


def check(pool, case, style, wires):
    for rank, differing in enumerate(pool.run(run_case, case, style, *wires)):
        assert not differing, f"rank {rank}: {differing}"


@pytest.mark.parametrize(
    "wires", slow_but([(WIRES[2],)], [(wires,) for wires in WIRES]), ids="-".join
)
def test_every_wire_equals_a_layer_that_quantises_eagerly(two_devices, wires):
    case = one_case(GroupedExperts, (9, 14), dtype=torch.bfloat16)
    check(two_devices, case, GroupedExperts, wires)


TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 512, 512, 256, 8, 2


def signal_to_noise(rank, codegen, options):
    """Return decibels of output, input gradient and the least of the expert weights' gradients.

    The gate weight multiplies what the combine brought back, after the down projection, where
    MegaScale-MoE puts it under FP8 (section 7 of the paper).
    """
    torch._dynamo.reset()
    own = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, WIDTH, generator=own).bfloat16()
    gradient = torch.randn(TOKENS, WIDTH, generator=own).bfloat16()
    results = []
    for asked in ({}, options):
        layer = GroupedExperts(WIDTH, HIDDEN, EXPERTS, TOP_K, dist.group.WORLD)
        settings = {"megamoe.codegen": codegen, "megamoe.chunks": 2, "megamoe.strict": True}
        settings |= {f"megamoe.{name}": value for name, value in asked.items()}
        compiled = torch.compile(layer, backend="megamoe", fullgraph=True, options=settings)
        rows = x.clone().requires_grad_()
        output = compiled(rows)
        output.backward(gradient)
        weights = [layer.w1.grad, layer.w2.grad, layer.w3.grad]
        results.append([output.detach(), rows.grad, *weights])
    ratios = [decibels(exact, other) for exact, other in zip(*results, strict=True)]
    return ratios[0], ratios[1], min(ratios[2:])


def decibels(exact, other):
    error = (exact.double() - other.double()).square().sum()
    return 10 * math.log10(exact.double().square().sum() / error)


def check_signal(pool, codegen, options, floors):
    for measured in pool.run(signal_to_noise, codegen, options):
        assert all(ratio >= floor for ratio, floor in zip(measured, floors, strict=True)), measured


FLOORS = [
    (("fp8", "same"), (28, 27.5, 25), "fx"),
    (("fp8", "fp8"), (26, 26, 25), "fx"),
    (("fp8", "fp8"), (26, 26, 25), "inductor"),
    (("fp8", "same"), (28, 27.5, 25), "inductor"),
]


@pytest.mark.parametrize(("wires", "floors", "codegen"), exhaustive_but(FLOORS[:3], FLOORS))
def test_routed_output_and_gradients_keep_their_signal(two_ranks, wires, floors, codegen):
    options = dict(zip(("dispatch_wire", "combine_wire"), wires, strict=True))
    check_signal(two_ranks, codegen, options, floors)
