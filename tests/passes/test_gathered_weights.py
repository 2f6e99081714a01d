"""Weights that were gathered in eight bits reach products as they came, in both directions."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.graph.query import is_tangent
from moe_compile.ops.scaled_products import (
    DEQUANTIZE_WEIGHT,
    QUANTIZE_WEIGHT,
    SCALED_GROUPED_MM,
)
from passes.feed_products import FeedProducts
from tests.capture import state
from tests.layers import GroupedExperts
from tests.passes.test_feed_products import called, layer, traced
from tests.slow_parameters import slow_but

EXPERTS, DEPTH, COLUMNS = 4, 160, 272


def in_eight_bits(dtype=torch.bfloat16):
    """Return payload `[E, K, N]` and scales of a weight; one of its blocks is all zeros."""
    torch.manual_seed(0)
    weight = torch.randn(EXPERTS, COLUMNS, DEPTH).mul(torch.randn(EXPERTS, COLUMNS, 1).exp())
    weight[1, :128, :128] = 0.0
    return QUANTIZE_WEIGHT(weight.to(dtype).transpose(1, 2), "blockwise")


def unpacked(payload, scales, dtype=torch.bfloat16):
    return DEQUANTIZE_WEIGHT(payload, scales, "blockwise", dtype)


def again(weight, recipe="blockwise"):
    return QUANTIZE_WEIGHT(weight, recipe)


FED = {
    "as it is": lambda p, s: again(unpacked(p, s)),
    "turned": lambda p, s: again(unpacked(p, s).transpose(-2, -1)),
    "turned twice": lambda p, s: again(unpacked(p, s).permute(0, 2, 1).contiguous().mT),
    "rounded later": lambda p, s: again(unpacked(p, s, torch.float32).mT.bfloat16()),
    "some experts": lambda p, s: again(unpacked(p, s)[1:3]),
    "one part": lambda p, s: again(unpacked(p, s).mT.split([1, 3])[1][1:]),
}


def folded(program, *inputs):
    """Return the graph of `program` after the pass."""
    gm = make_fx(program, tracing_mode="fake")(*inputs)
    gm.graph.eliminate_dead_code()
    report = FeedProducts().run(gm.graph, state())
    gm.graph.lint()
    gm.recompile()
    return gm, report


@pytest.mark.parametrize("program", FED.values(), ids=FED)
def test_a_weight_is_read_as_it_came(program):
    """The same bits, in the layout that products ask for."""
    inputs = in_eight_bits()
    gm, report = folded(program, *inputs)
    assert report.changed
    assert not called(gm.graph, QUANTIZE_WEIGHT, DEQUANTIZE_WEIGHT)
    for mine, expected in zip(gm(*inputs), program(*inputs), strict=True):
        assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))
        assert mine.stride() == expected.stride()


OTHERS = {
    "rows of each expert": lambda p, s: again(unpacked(p, s)[:, 128:]),
    "scales of columns": lambda p, s: again(unpacked(p, s), "rowwise"),
    "never bfloat16": lambda p, s: again(unpacked(p, s, torch.float32)),
    "other values": lambda p, s: again(unpacked(p, s) * 2),
    "rounded otherwise": lambda p, s: again(unpacked(p, s, torch.float16).bfloat16()),
}


@pytest.mark.parametrize("program", OTHERS.values(), ids=OTHERS)
def test_another_weight_is_quantised(program):
    gm, report = folded(program, *in_eight_bits())
    assert not report.changed
    assert called(gm.graph, QUANTIZE_WEIGHT) and called(gm.graph, DEQUANTIZE_WEIGHT)


def test_somebody_else_still_reads_the_values():
    def program(payload, scales):
        weight = unpacked(payload, scales)
        return *again(weight), weight.sum()

    inputs = in_eight_bits()
    gm, _ = folded(program, *inputs)
    assert called(gm.graph, DEQUANTIZE_WEIGHT) and not called(gm.graph, QUANTIZE_WEIGHT)
    assert torch.equal(gm(*inputs)[2], program(*inputs)[2])


class Gathered(GroupedExperts):
    """Its weights came in eight bits; as in torchtitan they are stored transposed."""

    def make_experts(self, width, hidden, rand):
        shapes = {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}
        self.came = {name: again(rand(self.local, *size)) for name, size in shapes.items()}

    w1, w2, w3 = (property(lambda self, n=n: unpacked(*self.came[n])) for n in ("w1", "w2", "w3"))


@pytest.mark.parametrize("chunks", slow_but([2], [1, 2]))
def test_no_graph_of_a_layer_quantises_a_weight_or_unpacks_it(fake_ranks, chunks):
    """Forward each payload is read as it came; backward it is transposed, once for all chunks."""
    for graph in traced(layer(fake_ranks, Gathered), chunks=chunks):
        assert not called(graph, QUANTIZE_WEIGHT, DEQUANTIZE_WEIGHT)
        assert len(called(graph, SCALED_GROUPED_MM)) == 3 * chunks
        written = called(graph, torch.ops.aten.clone.default)
        written = [n for n in written if n.meta["val"].dtype is torch.float8_e4m3fn]
        assert len(written) == (3 if any(map(is_tangent, graph.nodes)) else 0)


def test_products_in_bfloat16_unpack_weights_again_in_the_backward(fake_ranks):
    """And keep nothing but what came."""
    forward, backward = traced(layer(fake_ranks, Gathered), expert_compute="same")
    for graph in (forward, backward):
        assert len(called(graph, DEQUANTIZE_WEIGHT)) == 3
