"""What a GPU cannot do is not asked of it, is said, and what it does wrongly is put right."""

import dataclasses
import logging

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import chip_limits
from moe_compile.journal.reasons import Reason
from passes.detect_regions import DetectRegions
from passes.kinds.by_counts import experts
from passes.plan_regions import PlanRegions
from passes.zero_empty_groups import GROUPED, ZeroEmptyGroups
from tests.capture import dynamo_graphs, state
from tests.layers import GroupedExperts

AMPERE, ADA, HOPPER, BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0)
WIDTH, HIDDEN = 64, 48


@pytest.fixture
def on_gpu(monkeypatch):
    """Have graphs compiled for the processor as for a GPU of some compute capability."""

    def use(capability):
        experts._warn.cache_clear()
        monkeypatch.setattr(chip_limits, "capability_of", lambda device: capability)

    yield use
    experts._warn.cache_clear()


def planned(fake_ranks, link_gb_per_s=None, **options):
    x = torch.randn(512, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(GroupedExperts(WIDTH, HIDDEN, 8, 2, fake_ranks), x)
    ours = state(**options)
    if link_gb_per_s:
        ours.hardware = dataclasses.replace(ours.hardware, link_gb_per_s=link_gb_per_s)
    DetectRegions().run(gm.graph, ours)
    PlanRegions().run(gm.graph, ours)
    return ours.experts[0]


@pytest.mark.parametrize("capability", [AMPERE, ADA, HOPPER, None])
def test_rows_become_eight_bits_only_where_the_gpu_converts(fake_ranks, on_gpu, capability):
    on_gpu(capability)
    one = planned(fake_ranks, chunks=2, dispatch_wire="fp8", combine_wire="fp8")
    if capability == AMPERE:
        assert {one.plan.dispatch_wire, one.plan.combine_wire} == {"same"}
        assert one.left["dispatch_wire"].reason is one.left["combine_wire"].reason is Reason.NO_E4M3
    else:
        assert {one.plan.dispatch_wire, one.plan.combine_wire} == {"fp8"}


@pytest.mark.parametrize("capability", [ADA, HOPPER])
def test_products_are_in_eight_bits_only_where_tensor_cores_multiply_them(
    fake_ranks, on_gpu, capability
):
    on_gpu(capability)
    one = planned(fake_ranks, chunks=2, expert_compute="fp8_blockwise")
    if capability == ADA:
        assert one.plan.expert_compute == "same"
        assert one.left["expert_compute"].reason is Reason.NO_E4M3
    else:
        assert one.plan.expert_compute == "fp8_blockwise"


def test_the_planner_prices_no_eight_bits_where_there_are_none(fake_ranks, on_gpu):
    options = {"equal_tokens": True, "chunks": 2, "dispatch_wire": "auto", "numerics": "lossy"}
    for capability, wire in ((HOPPER, "fp8"), (AMPERE, "same")):
        on_gpu(capability)
        one = planned(fake_ranks, 0.005, **options)
        assert one.decision.chosen.candidate.dispatch_wire == one.plan.dispatch_wire == wire


@pytest.mark.parametrize("capability", [AMPERE, (12, 0)])
def test_products_the_host_waits_for_are_said_once_and_left_whole(
    fake_ranks, on_gpu, caplog, capability
):
    on_gpu(capability)
    with caplog.at_level(logging.WARNING, experts.__name__):
        for _ in range(2):
            one = planned(fake_ranks)
            assert (one.plan.num_chunks, one.left["chunks"].reason) == (1, Reason.PRODUCTS_WAIT)
        assert planned(fake_ranks, chunks=2).plan.num_chunks == 2
    (record,) = caplog.records
    assert "no grouped GEMM kernel" in record.getMessage()


@pytest.mark.parametrize(
    "options",
    [{"routing_skew": 0.5}, {"nodes": "exact", "node_ranks": 1}, {"dispatch": "all_gather",
     "chunk_by": "tokens"}, {}],
)  # fmt: skip
def test_auto_chunks_no_products_that_the_host_waits_for_whatever_else_is_asked(
    fake_ranks, on_gpu, options
):
    on_gpu(HOPPER)
    assert planned(fake_ranks, 0.02, equal_tokens=True, **options).plan.num_chunks > 1
    on_gpu(AMPERE)
    one = planned(fake_ranks, 0.02, equal_tokens=True, **options)
    assert (one.plan.num_chunks, one.left["chunks"].reason) == (1, Reason.PRODUCTS_WAIT)


def test_where_torch_has_a_kernel_nothing_is_said(fake_ranks, on_gpu, caplog):
    on_gpu(BLACKWELL)
    assert planned(fake_ranks).plan.num_chunks == 2
    said = [r for r in caplog.records if r.name == experts.__name__]
    assert not said


def test_every_weight_gradient_of_a_layer_is_read_so_on_blackwell(fake_ranks, on_gpu):
    on_gpu(BLACKWELL)
    x = torch.randn(32, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(GroupedExperts(WIDTH, HIDDEN, 8, 2, fake_ranks), x)
    ours, _ = rewrite(gm, MegaMoEConfig(hardware="cpu", chunks=2))
    inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    _, backward = trace_both(gm, inputs, ours)
    products = backward.graph.find_nodes(op="call_function", target=GROUPED)
    of_weights = [node for node in products if node.meta["val"].dim() == 3]
    assert len(of_weights) == 3 * 2  # gate, up and down, in two chunks
    for product in of_weights:
        assert [user.target for user in product.users] == [torch.ops.aten.where.self]


class Unwritten(fx.Interpreter):
    """Runs a graph on a GPU that leaves what memory held where a group has no rows."""

    def call_function(self, target, args, kwargs):
        out = super().call_function(target, args, kwargs)
        if target is GROUPED and args[0].dim() == args[1].dim() == 2:
            ends = args[2].tolist()
            for group, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                if begin == end:
                    out[group] = torch.nan
        return out


def gradients(rows, gate, down, ends):
    """Return gradients of two grouped products; weights as they are, and transposed."""
    hidden = torch._grouped_mm(rows, gate, offs=ends)
    out = torch._grouped_mm(hidden, down.transpose(-2, -1), offs=ends)
    return torch.autograd.grad(out.float().square().sum(), (rows, gate, down))


@pytest.mark.parametrize("ends", [[0, 3, 3, 8], [0, 0, 0, 0], [2, 4, 6, 8]])
def test_a_group_without_rows_has_a_gradient_of_zeros_on_blackwell(on_gpu, ends):
    torch.manual_seed(0)
    ends = torch.tensor(ends, dtype=torch.int32)
    shapes = (int(ends[-1]), WIDTH), (4, WIDTH, HIDDEN), (4, WIDTH, HIDDEN)
    tensors = [torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    expected = gradients(*tensors, ends)
    traced = make_fx(gradients, tracing_mode="fake")(*tensors, ends)
    for capability, num_products in ((HOPPER, 0), (BLACKWELL, 2)):
        on_gpu(capability)
        report = ZeroEmptyGroups().run(traced.graph, state())
        assert len(report.applied) == num_products
        traced.graph.lint()
        found = Unwritten(traced).run(*tensors, ends)
        has_empty = any(grad.isnan().any() for grad in found)
        assert has_empty == (capability == HOPPER and ends.tolist() != [2, 4, 6, 8])
    assert all(map(torch.equal, found, expected))
