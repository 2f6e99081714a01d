"""Rows that arrive in eight bits feed products; weights are quantised once in each direction."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_graphs
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.edit import GIVEN
from moe_compile.graph.query import is_wait, tensor_of
from moe_compile.ops.quantized_rows import (
    UNPACK_DEQUANTIZE,
    UNPACK_DEQUANTIZE_PERMUTE,
    pack_rows,
)
from moe_compile.ops.scaled_products import MESSAGE_ROWS, QUANTIZE_ROWS, QUANTIZE_WEIGHT
from moe_compile.ops.weight_gradients import QUANTIZE_COLUMNS, SCALED_WEIGHT_GRADIENT
from passes.feed_products import FeedProducts
from tests.capture import dynamo_graphs, state
from tests.layers import GroupedExperts
from tests.passes.test_fold_row_moves import indices
from tests.slow_parameters import slow_but

WIDTH, LOCAL = 128, 4
ASKED = {"hardware": "cpu", "codegen": "fx", "chunks": 2, "expert_compute": "fp8_blockwise"}
IN_EIGHT_BITS = {"dispatch_wire": "fp8", "combine_wire": "fp8"}


def traced(program, **options):
    """Return the forward and the backward graph."""
    x = torch.randn(4, 8, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    gm, *_ = dynamo_graphs(lambda x: program(x.flatten(0, 1)), x)
    ours, _ = rewrite(gm, MegaMoEConfig(**(ASKED | options)))
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    return [module.graph for module in trace_graphs(gm, inputs, ours)]


def layer(group, style=GroupedExperts):
    return style(WIDTH, 64, 2 * LOCAL, 2, group)


def called(graph, *targets):
    return [n for n in graph.nodes if n.target in targets]


def unpacked(graph):
    return called(graph, UNPACK_DEQUANTIZE, UNPACK_DEQUANTIZE_PERMUTE)


@pytest.mark.parametrize("chunks", slow_but([2], [1, 2, 4]))
def test_rows_and_gradients_that_arrive_are_fed_and_messages_are_kept(fake_ranks, chunks):
    """Forward the rows of the combine alone are unpacked; backward the gradients of the dispatch,
    and what weights' gradients read: each once."""
    forward, backward = traced(layer(fake_ranks), chunks=chunks, **IN_EIGHT_BITS)
    fed, back = called(forward, MESSAGE_ROWS), called(backward, MESSAGE_ROWS)
    assert len(fed) == len(back) == chunks  # gate and up read one
    assert all(is_wait(node.args[0]) for node in (*fed, *back))
    assert not any(GIVEN in node.meta for node in (*fed, *back))  # of the calls that they were
    assert len(called(forward, QUANTIZE_ROWS)) == chunks  # what the down projection reads
    assert len(unpacked(forward)) == 1
    given = (tensor_of(n) for n in backward.find_nodes(op="placeholder"))
    assert sum(t is not None and t.dtype is torch.uint8 for t in given) == chunks
    assert len(unpacked(backward)) == 2 * chunks + 1


class Padded(GroupedExperts):
    """Reads its rows by an index behind which a row of zeros stands, as torchtitan pads groups."""

    def padding(self, rows):
        return rows.new_zeros((1, rows.shape[1]))

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        x = torch.cat([rows, self.padding(rows)])[perm]
        h = F.silu(torch._grouped_mm(x, self.w1, offs=offs))
        out = torch._grouped_mm(h, self.w2, offs=offs)
        return torch.zeros_like(out).index_copy(0, perm, out)


class Filled(Padded):
    """Its row of zeros is as Inductor writes it."""

    def padding(self, rows, value=0.0):
        return torch.full((1, rows.shape[1]), value, dtype=rows.dtype)


class FilledOtherwise(Filled):
    """Its row is not of the bits of zeros."""

    def padding(self, rows):
        return super().padding(rows, -0.0)


def test_rows_that_are_no_zeros_are_no_rows_of_a_message(fake_ranks):
    forward, _ = traced(layer(fake_ranks, FilledOtherwise), chunks=1, dispatch_wire="fp8")
    assert not called(forward, MESSAGE_ROWS) and unpacked(forward)


@pytest.mark.parametrize("style", [Padded, Filled])
def test_rows_of_padding_are_rows_of_a_message(fake_ranks, style):
    forward, _ = traced(layer(fake_ranks, style), chunks=1, dispatch_wire="fp8")
    (fed,) = called(forward, MESSAGE_ROWS)
    assert is_wait(fed.args[0])  # not copied, to put rows of zeros behind it
    assert fed.args[1].target is torch.ops.aten.where.self
    assert unpacked(forward) == []


@settings(max_examples=10, deadline=None)
@given(order=indices(5, 4), perm=indices(7, 7), is_full=st.booleans())
def test_rows_in_an_order_before_rows_of_zeros_are_rows_of_a_message(order, perm, is_full):
    """As two hops bring them to torchtitan's experts; nothing is unpacked or joined."""
    message = pack_rows(torch.randn(4, WIDTH).bfloat16(), None)

    def program(message, order, perm):
        rows = UNPACK_DEQUANTIZE_PERMUTE(message, order, WIDTH, torch.bfloat16).clone()
        size = (2, WIDTH)
        zeros = torch.full(size, 0.0, dtype=rows.dtype) if is_full else rows.new_zeros(size)
        padded = torch.cat([rows, zeros])
        payload, scales = QUANTIZE_ROWS(padded[perm], "blockwise")
        return payload.float() * scales, perm.new_ones(padded.shape[0])

    gm = make_fx(program, tracing_mode="symbolic")(message, order, perm)
    FeedProducts().run(gm.graph, state())
    gm.graph.lint()
    gm.recompile()
    (fed,) = called(gm.graph, MESSAGE_ROWS)
    assert fed.args[0].op == "placeholder" and not unpacked(gm.graph)
    for given_order in (order, order[:0]):
        named = perm if given_order is order else perm.clamp(-2, 1)
        mine, theirs = (run(message, given_order, named) for run in (gm, program))
        assert all(map(torch.equal, mine, theirs))


class Cut(GroupedExperts):
    """Its products take a run of the rows, as chunks of torchtitan's padded rows do."""

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        x = torch.cat([rows, rows.new_zeros((8, rows.shape[1]))])
        x = x[torch.cat([perm, perm.new_full((8,), -1)])]
        gate = F.silu(torch._grouped_mm(x[:-8], self.w1, offs=offs))
        out = torch._grouped_mm(gate * torch._grouped_mm(x[:-8], self.w3, offs=offs), self.w2, offs)
        return torch.zeros_like(out).index_copy(0, perm, out)


def test_runs_of_rows_are_runs_of_their_index(fake_ranks):
    """Two products cut the same rows, each for itself."""
    forward, backward = traced(layer(fake_ranks, Cut), chunks=1, dispatch_wire="fp8")
    (fed,) = called(forward, MESSAGE_ROWS)
    assert fed.args[1].target is torch.ops.aten.slice.Tensor
    assert unpacked(forward) == []
    assert len(unpacked(backward)) == 2  # for gradients of weights, and those of the dispatch


class Doubled(GroupedExperts):
    """Something else of the forward reads the rows that arrive."""

    def experts(self, rows, received):
        return super().experts(rows, received) + rows


def test_rows_that_something_else_reads_are_fed_and_unpacked(fake_ranks):
    forward, _ = traced(layer(fake_ranks, Doubled), dispatch_wire="fp8")
    assert len(called(forward, MESSAGE_ROWS)) == 2
    assert len(unpacked(forward)) == 2


OTHERS = [
    {"expert_compute": "fp8_rowwise", "dispatch_wire": "fp8"},
    {"expert_compute": "fp8_blockwise"},
    {"disable_passes": ("feed_products",), "dispatch_wire": "fp8"},
]


@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_rows_of_another_format_are_quantised(fake_ranks, options):
    forward, _ = traced(layer(fake_ranks), **options)
    assert called(forward, MESSAGE_ROWS) == []
    assert len(called(forward, QUANTIZE_ROWS)) == 4


def test_a_message_that_is_kept_is_quantised_anew_for_gradients_of_weights(fake_ranks):
    """By the backward pass, along rows; nothing of it is in the forward."""
    options = {"fp8_products": ("gate", "up", "down", "grad_input", "grad_weight")}
    forward, backward = traced(layer(fake_ranks), **options, **IN_EIGHT_BITS)
    assert len(called(forward, MESSAGE_ROWS)) == 2 and len(unpacked(forward)) == 1
    given = (tensor_of(n) for n in backward.find_nodes(op="placeholder"))
    assert sum(t is not None and t.dtype is torch.uint8 for t in given) == 2
    assert len(unpacked(backward)) == 2 * 2 + 1
    anew = called(backward, QUANTIZE_COLUMNS)
    assert len(anew) == 2 * 5  # gate and up read the same rows
    assert sum(node.args[0] in unpacked(backward) for node in anew) == 2  # of rows, by the index
    assert len(called(backward, SCALED_WEIGHT_GRADIENT)) == 2 * 3
    assert called(forward, QUANTIZE_COLUMNS) == []


def test_gradients_of_another_type_are_quantised(fake_ranks):
    forward, backward = traced(
        layer(fake_ranks), expert_compute="fp8_blockwise_e5m2", **IN_EIGHT_BITS
    )
    assert len(called(forward, MESSAGE_ROWS)) == 2
    assert called(backward, MESSAGE_ROWS) == []


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_layer_that_is_computed_again_has_the_same_operators(fake_ranks, is_recomputed):
    inner = layer(fake_ranks)

    def program(x):
        return checkpoint(inner, x, use_reentrant=False) if is_recomputed else inner(x)

    forward, backward = traced(program, dispatch_wire="fp8")
    assert len(called(forward, MESSAGE_ROWS)) == 2
    assert len(called(backward, MESSAGE_ROWS)) == 2 * is_recomputed


ONCE = [{"chunks": 1}, {"chunks": 4}, {"batch_parts": 2}, {"chunk_by": "tokens"}]


@pytest.mark.parametrize("options", slow_but(ONCE[1:2], ONCE), ids=str)
def test_each_experts_weight_is_quantised_once_forward_and_once_backward(fake_ranks, options):
    """Its payload is not kept for the backward, which quantises the transposed weight."""
    forward, backward = traced(layer(fake_ranks), equal_tokens=True, **options)
    for graph in (forward, backward):
        quantised = called(graph, QUANTIZE_WEIGHT)
        assert [node.meta["val"][0].shape[0] for node in quantised] == 3 * [LOCAL]  # no chunk's own
    (output,) = forward.find_nodes(op="output")
    kept = [tensor_of(n) for n in output.all_input_nodes]
    assert not any(t is not None and t.dtype is torch.float8_e4m3fn for t in kept)
