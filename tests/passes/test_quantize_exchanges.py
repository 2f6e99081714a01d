"""What the graph holds when exchanges are quantised: bytes on the wire, all else as it was."""

import dataclasses

import pytest
import torch
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd

from moe_compile.backend import rewrite
from moe_compile.errors import RegionRefused
from moe_compile.graph.query import is_all_to_all
from moe_compile.journal.reasons import Reason
from moe_compile.ops.packed_rows import DEQUANTIZE_EXCHANGED
from moe_compile.ops.quantized_rows import GATHER_QUANTIZE_PACK
from passes.pipeline import DYNAMO, run_level
from tests.capture import dynamo_graphs, state
from tests.layers import GroupedExperts, LoopExperts
from tests.slow_parameters import slow_but

C10D = torch.ops._c10d_functional
WIDTH, HIDDEN, EXPERTS, TOP_K = 128, 24, 8, 2


def quantized(program, dtype=torch.bfloat16, **options):
    """Return the graph of `program` after our passes, and what became of its wires."""
    x = torch.randn(32, WIDTH, dtype=dtype, requires_grad=True)
    (gm,) = dynamo_graphs(program, x)
    results = run_level(DYNAMO, gm.graph, state(**options))
    reports = {r.pass_name: r for r in results}
    skipped = [v for v in reports["plan_regions"].skipped if v.option.endswith("_wire")]
    return gm, dataclasses.replace(reports["quantize_exchanges"], skipped=tuple(skipped))


def layer(style, group, width=WIDTH):
    return style(width, HIDDEN, EXPERTS, TOP_K, group)


def messages(graph):
    return [n for n in graph.nodes if n.target is GATHER_QUANTIZE_PACK]


def unpacked(graph):
    return [n for n in graph.nodes if n.target is DEQUANTIZE_EXCHANGED]


@pytest.mark.parametrize("chunks", slow_but([2], [1, 2, 4]))
@pytest.mark.parametrize("style", [GroupedExperts, LoopExperts])
def test_each_chunk_of_the_named_exchange_is_a_message_the_others_are_not(
    fake_ranks, style, chunks
):
    gm, report = quantized(layer(style, fake_ranks), chunks=chunks, dispatch_wire="fp8")
    assert report.applied == ("dispatch of region 0",)
    assert [v.reason for v in report.skipped] == [Reason.NOT_ASKED]
    assert len(messages(gm.graph)) == len(unpacked(gm.graph)) == chunks
    launches = [n for n in gm.graph.nodes if is_all_to_all(n)]
    assert len(launches) == 1 + 2 * chunks
    assert sum(n.args[0] in messages(gm.graph) for n in launches) == chunks


def test_both_exchanges_keep_their_split_lists_and_swap_them_for_the_gradient(fake_ranks):
    gm, report = quantized(
        layer(GroupedExperts, fake_ranks), chunks=1, dispatch_wire="fp8", combine_wire="fp8_forward"
    )
    assert report.applied == ("dispatch of region 0", "combine of region 0")
    launches = [n for n in gm.graph.nodes if is_all_to_all(n) and n.args[0] in messages(gm.graph)]
    for launch, back in zip(launches, unpacked(gm.graph), strict=True):
        assert list(back.args[2:4]) == list(launch.args[1:3])
    assert [back.args[-1] for back in unpacked(gm.graph)] == [True, False]


def test_the_report_has_the_bytes_of_a_row_before_and_after(fake_ranks):
    x = torch.randn(32, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(layer(GroupedExperts, fake_ranks), x)
    _, compilation = rewrite(gm, state(dispatch_wire="fp8").config)
    (region,) = compilation.regions
    assert region.wires == {"dispatch": ("fp8", 256, 132), "combine": ("same", 256, 256)}
    assert "dispatch in fp8: 132 of 256 bytes per row (0.516)" in region.remarks


class Plain(GroupedExperts):
    """Rows travel there and back, and are doubled between."""

    def forward(self, x):
        return self.with_exchange(x, all_to_all_single_autograd)

    def with_exchange(self, x, exchange):
        flat = self.route(x)[1].reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = (flat[:, None] == torch.arange(self.num_experts)).sum(0)
        received = self.exchange_counts(counts)
        sent, got = self.splits(counts, received)
        rows = exchange(x[order // self.top_k], got, sent, self.group)
        return exchange(self.between(rows), sent, got, self.group)

    def between(self, rows):
        return rows * 2


class LaunchesWithoutGradient(Plain):
    def forward(self, x):
        return self.with_exchange(x, self.exchange)

    @staticmethod
    def exchange(rows, got, sent, group):
        with torch.no_grad():
            launched = C10D.all_to_all_single(rows, got, sent, group.group_name)
        return C10D.wait_tensor(launched)


class ScoresFirst(Plain):
    """Sends what is as wide as a narrow layer's rows, before the rows and by the same sizes."""

    def with_exchange(self, x, exchange):
        def both(rows, *splits):
            if rows.dtype is torch.float32:
                return exchange(rows, *splits)
            scores = exchange(rows[:, :32].float(), *splits)
            return exchange(rows, *splits).float() * scores.sum(1, keepdim=True)

        return super().with_exchange(x, both)


@pytest.mark.parametrize(
    ("style", "reason"),
    [
        (Plain, None),
        (LaunchesWithoutGradient, Reason.STATE_CHANGES),
    ],
)
def test_what_eight_bits_would_falsify_travels_as_it_is(fake_ranks, style, reason):
    gm, report = quantized(layer(style, fake_ranks), chunks=1, dispatch_wire="fp8")
    assert [v.reason for v in report.skipped] == [r for r in (reason, Reason.NOT_ASKED) if r]
    assert len(messages(gm.graph)) == (reason is None)


def test_of_what_travels_together_the_widest_goes_in_eight_bits(fake_ranks):
    gm, report = quantized(layer(ScoresFirst, fake_ranks), chunks=1, dispatch_wire="fp8")
    assert [v.reason for v in report.skipped] == [Reason.NOT_ASKED]
    assert len(messages(gm.graph)) == 1


class Communicates(Plain):
    def between(self, rows):
        return all_reduce(rows, "sum", self.group)


def test_strict_says_what_a_region_that_communicates_keeps(fake_ranks):
    x = torch.randn(32, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(layer(Communicates, fake_ranks), x)
    with pytest.raises(
        RegionRefused, match=r"dispatch_wire was requested .* the experts communicate"
    ):
        rewrite(gm, state(chunks=1, dispatch_wire="fp8", strict=True).config)
