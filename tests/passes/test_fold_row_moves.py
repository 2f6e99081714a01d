"""Gathers and permutations next to the wire's operators become part of them; values stay."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.row_moves import row_gather
from moe_compile.ops.quantized_rows import (
    GATHER_QUANTIZE_PACK as PACK,
)
from moe_compile.ops.quantized_rows import (
    REFERENCES,
    UNPACK_DEQUANTIZE,
    UNPACK_DEQUANTIZE_PERMUTE,
)
from moe_compile.ops.row_sums import SUM_OF_PLACES
from passes.fold_row_moves import NO_GATHER, NO_PERMUTATION, FoldRowMoves
from passes.lower_row_ops import LowerRowOps
from tests.capture import CapturedError, state
from tests.layers import GroupedExperts, LoopExperts
from tests.slow_parameters import slow_but

WIDTH = 128
ROWS = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()


def folded(program, *inputs):
    """Return the traced graph of `program` after the pass, checked to compute the same."""
    gm = make_fx(program, tracing_mode="fake")(*inputs)
    report = FoldRowMoves().run(gm.graph, state())
    gm.graph.lint()
    for node in gm.graph.nodes:  # else Inductor gives a call the strides of other arguments
        given, _ = node.meta.get("eager_input_vals", (node.args, {}))
        assert len(given) == len(node.args)
    gm.recompile()
    for mine, theirs in zip(gm(*inputs), program(*inputs), strict=True):
        assert torch.equal(mine, theirs)
    return gm.graph, report


def targets(graph):
    return [n.target for n in graph.nodes]


def gathers(graph):
    return [n for n in graph.nodes if (move := row_gather(n)) and move[0].op == "placeholder"]


def indices(count, size):
    return st.lists(st.integers(-size, size - 1), min_size=count, max_size=count).map(torch.tensor)


def test_a_wide_index_of_as_many_rows_as_a_mask_says_is_that_of_rows():
    """Asking how many there are ended the pass."""

    def program(x, mask):
        index = torch.arange(len(x)).masked_select(mask)
        return torch.gather(x, 0, index.unsqueeze(1).expand(-1, x.shape[1]))

    graph = make_fx(program, tracing_mode="symbolic")(ROWS, torch.arange(12) % 2 == 0).graph
    (gather,) = (n for n in graph.nodes if n.target is torch.ops.aten.gather.default)
    source, index = row_gather(gather)
    assert source.op == "placeholder"
    assert index.target is torch.ops.aten.masked_select.default


@given(first=indices(9, 12), second=indices(7, 9), cut=st.integers(0, 7))
@settings(deadline=None)
def test_any_chain_of_gathers_and_splits_becomes_one_index(first, second, cut):
    def program(x, i, j):
        parts = torch.split(x[i][j], [cut, 7 - cut])
        return [PACK(part) for part in parts]

    graph, report = folded(program, ROWS, first, second)
    assert len(report.applied) == 2 and not report.skipped
    assert not gathers(graph)
    packs = graph.find_nodes(op="call_function", target=PACK)
    assert all(pack.args[0].op == "placeholder" and len(pack.args) == 2 for pack in packs)
    assert targets(graph).count(torch.ops.aten.index.Tensor) == 1  # i[j], for both parts


@given(index=st.lists(st.integers(0, 11), min_size=9, max_size=9).map(torch.tensor))
@settings(deadline=None)
def test_torchtitans_gather_by_an_expanded_index_is_one(index):
    def program(x, i):
        return [PACK(torch.gather(x, 0, i.reshape(-1, 1).expand(-1, WIDTH)))]

    graph, report = folded(program, ROWS, index)
    assert len(report.applied) == 1 and torch.ops.aten.gather.default not in targets(graph)


@given(index=indices(9, 12))
@settings(deadline=None)
def test_a_permutation_of_unpacked_rows_becomes_one_with_the_unpack(index):
    message = PACK(ROWS)

    def program(m, i):
        return [UNPACK_DEQUANTIZE(m, WIDTH, torch.bfloat16)[i]]

    graph, report = folded(program, message, index)
    assert len(report.applied) == 1
    assert UNPACK_DEQUANTIZE_PERMUTE in targets(graph)
    assert UNPACK_DEQUANTIZE not in targets(graph)


MASK = torch.arange(12) % 2 == 0
SOME = torch.tensor([3, 1, 1])


@pytest.mark.parametrize(
    ("program", "index"),
    [
        (lambda x, i: [PACK(rows := x[i]), rows], SOME),
        (lambda x, i: [PACK(x[i] * 2)], SOME),
        (lambda x, i: [PACK(x[i])], MASK),
        (lambda x, i: [PACK(torch.gather(x, 0, i[:, None] + torch.arange(WIDTH) % 2))], SOME),
        (
            lambda x, i: [
                PACK(torch.gather(torch.cat([x, x], 1), 0, i[:, None].expand(-1, WIDTH)))
            ],
            SOME,
        ),
        (lambda x, i: [PACK((parts := torch.split(x[i], [1, 2]))[0]), parts[1]], SOME),
        (lambda x, i: [PACK(torch.split(x[i], [100, 28], 1)[0])], SOME),
        (lambda x, i: [PACK(torch.split(x, [5, 7])[0]), i], SOME),
    ],
    ids=[
        "read",
        "computed",
        "mask",
        "columns",
        "first columns",
        "piece read",
        "split columns",
        "no gather",
    ],
)
def test_what_is_no_gather_of_whole_rows_for_the_pack_alone_stays(program, index):
    graph, report = folded(program, ROWS, index)
    assert [v.detail for v in report.skipped] == [NO_GATHER]
    assert all(len(n.args) == 1 for n in graph.nodes if n.target is PACK)


@given(index=indices(9, 24))
@settings(deadline=None)
def test_a_permutation_of_joined_messages_unpacks_them_once(index):
    def program(a, b, i):
        parts = [UNPACK_DEQUANTIZE(m, WIDTH, torch.bfloat16) for m in (a, b)]
        return [torch.cat(parts)[i]]

    graph, report = folded(program, PACK(ROWS), PACK(ROWS * 3), index)
    assert len(report.applied) == 2
    assert targets(graph).count(UNPACK_DEQUANTIZE_PERMUTE) == 1
    assert UNPACK_DEQUANTIZE not in targets(graph)


@pytest.mark.parametrize(
    "padding",
    [
        lambda rows: rows.new_zeros(rows.shape[-1]),
        lambda rows: torch.full((1, WIDTH), 0.0, dtype=rows.dtype),
    ],
    ids=["as written", "of Inductor"],
)
@given(index=st.lists(st.integers(-13, 12), min_size=9, max_size=9).map(torch.tensor))
@settings(deadline=None)
def test_torchtitans_padding_is_a_message_of_zeros(padding, index):
    """Inductor lowers no `new_zeros` that a pass emits."""

    def program(m, i):
        rows = UNPACK_DEQUANTIZE(m, WIDTH, torch.bfloat16)
        return [torch.vstack((rows, padding(rows)))[i, :]]

    graph, report = folded(program, PACK(ROWS), index)
    assert len(report.applied) == 1
    assert UNPACK_DEQUANTIZE_PERMUTE in targets(graph)
    assert UNPACK_DEQUANTIZE not in targets(graph)
    (joined,) = (n for n in graph.nodes if n.target is torch.ops.aten.cat.default)
    assert joined.args[0][1].target is torch.ops.aten.full.default


@given(first=indices(9, 12), cut=st.integers(0, 9))
@settings(deadline=None)
def test_slices_of_gathered_rows_are_slices_of_the_index(first, cut):
    def program(x, i):
        rows = x[i]
        return [PACK(rows[:cut]), PACK(rows[cut:])]

    graph, report = folded(program, ROWS, first)
    assert len(report.applied) == 2 and not gathers(graph)


@pytest.mark.parametrize(
    "program",
    [
        lambda rows, x, i: [torch.cat([rows, x])[i]],
        lambda rows, x, i: [torch.cat([rows, torch.zeros(1, WIDTH)])[i], x],
        lambda rows, x, i: [rows[i], rows + x],
    ],
    ids=["joined with others", "joined with zeros of another type", "read twice"],
)
def test_unpacked_rows_are_permuted_apart(program):
    def unpacked(message, x, i):
        return program(UNPACK_DEQUANTIZE(message, WIDTH, torch.bfloat16), x, i)

    _, report = folded(unpacked, PACK(ROWS), ROWS, SOME)
    assert [v.detail for v in report.skipped] == [NO_PERMUTATION]


def both_graphs(layer, **options):
    x = torch.randn(32, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    config = MegaMoEConfig(dispatch_wire="fp8", combine_wire="fp8", **options)
    traced = []

    def stop(*inputs):
        raise CapturedError

    def backend(gm, inputs):
        traced.extend(trace_both(gm, inputs, rewrite(gm, config)[0]))
        return stop

    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        contextlib.suppress(CapturedError),
    ):
        torch.compile(layer, backend=backend, fullgraph=True)(x)
    return [gm.graph for gm in traced]


@pytest.mark.parametrize("chunks", slow_but([1], [1, 2]))
def test_the_gather_before_the_dispatch_and_the_permutation_after_it_are_folded(fake_ranks, chunks):
    forward, _ = both_graphs(
        GroupedExperts(WIDTH, 64, 8, 2, fake_ranks), chunks=chunks, codegen="fx"
    )
    packs = forward.find_nodes(op="call_function", target=PACK)
    from_tokens = [n for n in packs if n.args[0].op == "placeholder" and len(n.args) == 2]
    assert len(packs) == 2 * chunks and len(from_tokens) == chunks
    assert targets(forward).count(UNPACK_DEQUANTIZE_PERMUTE) == chunks + (
        chunks > 1
    )  # and the combines, joined
    assert not any(move[0].op == "placeholder" for n in forward.nodes if (move := row_gather(n)))


@pytest.mark.parametrize(
    "style", [GroupedExperts, pytest.param(LoopExperts, marks=pytest.mark.slow)]
)
def test_for_inductor_on_a_cpu_the_operators_are_written_out(fake_ranks, style):
    for graph in both_graphs(style(WIDTH, 64, 8, 2, fake_ranks), chunks=2):
        assert not set(targets(graph)) & set(REFERENCES)
        assert torch.float8_e4m3fn in {
            n.meta["val"].dtype for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)
        }


def test_written_out_operators_compute_the_same():
    def program(x, i):
        message = PACK(x, i)
        return [message, UNPACK_DEQUANTIZE(message, WIDTH, torch.bfloat16)]

    with torch._subclasses.FakeTensorMode() as fake:
        inputs = [fake.from_tensor(ROWS), fake.from_tensor(SOME)]
        gm = make_fx(program)(*inputs)
    report = LowerRowOps().run(gm.graph, state())
    gm.graph.lint()
    gm.recompile()
    assert len(report.applied) == 2 and not set(targets(gm.graph)) & set(REFERENCES)
    for mine, theirs in zip(gm(ROWS, SOME), program(ROWS, SOME), strict=True):
        assert torch.equal(mine, theirs)


def test_sums_that_are_written_out_are_the_same_for_any_number_of_rows():
    def program(rows, places):
        return SUM_OF_PLACES([rows], places, torch.bfloat16)

    places = torch.tensor([[4, -1], [-1, -1], [0, 3]])
    gm = make_fx(program, tracing_mode="symbolic")(ROWS, places)
    report = LowerRowOps().run(gm.graph, state())
    gm.graph.lint()
    gm.recompile()
    assert report.applied and SUM_OF_PLACES not in targets(gm.graph)
    for some in (ROWS, ROWS[:5]):
        assert torch.equal(gm(some, places), program(some, places))
    none = torch.full((3, 2), -1)
    assert torch.equal(gm(ROWS[:0], none), program(ROWS[:0], none))
