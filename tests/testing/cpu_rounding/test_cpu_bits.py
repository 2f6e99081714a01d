"""What a CPU may round otherwise runs in parts, and is told; tests have a model that refuses it."""

import pytest
import torch

from moe_compile.backend import rewrite
from moe_compile.config import MegaMoEConfig
from moe_compile.journal.reasons import Left, Reason
from moe_compile.plan.chunk_numbers import LAST_BITS
from moe_compile.proof.kernel_bits import KernelBits, bits, bits_by
from moe_compile.regions.regions import RowProof
from moe_compile.testing.cpu_rounding.cpu_bits import CpuBits, recorded_bits, strict_bits
from moe_compile.testing.programs.run import BOUND_OF_LAST_BITS
from tests.attention_layers import SplitAttention
from tests.capture import dynamo_graphs
from tests.layers import LoopExperts
from tests.proof.verdicts import judge

NARROW, WIDE = 24, 64
"""Widths in float32: 96 bytes, and whole vectors."""


def layer_of(width, group, dtype=torch.float32):
    return LoopExperts(width, 2 * WIDE, 8, 2, group, dtype)


def tokens(width, dtype=torch.float32):
    return torch.randn(32, width, dtype=dtype, requires_grad=True)


def report_of(layer, x, **options):
    (gm,) = dynamo_graphs(layer, x)
    _, compilation = rewrite(gm, MegaMoEConfig(**options))
    (report,) = (*compilation.regions, *compilation.attention)
    return report


def told(report):
    return [remark for remark in report.remarks if remark.startswith(LAST_BITS)]


def test_a_narrow_layer_runs_in_chunks_and_the_report_says_that_last_bits_may_differ(fake_ranks):
    with bits_by(KernelBits()):
        report = report_of(layer_of(NARROW, fake_ranks), tokens(NARROW), chunks=2)
    assert (report.verdict, report.num_chunks) == ("chunked", 2)
    (remark,) = told(report)
    assert "rows of 96 bytes do not fill whole vectors" in remark
    assert "docs/numerics.md" in remark


@pytest.mark.parametrize(("width", "chunks"), [(WIDE, 2), (NARROW, 1)])
def test_nothing_is_told_of_rows_that_fill_vectors_nor_of_a_region_left_whole(
    fake_ranks, width, chunks
):
    with bits_by(KernelBits()):
        report = report_of(layer_of(width, fake_ranks), tokens(width), chunks=chunks)
    assert not told(report)


def test_several_threads_share_rows_that_fill_vectors(fake_ranks):
    torch.set_num_threads(2)
    try:
        with bits_by(KernelBits()):
            proof = judge(layer_of(WIDE, fake_ranks), tokens(WIDE))
    finally:
        torch.set_num_threads(1)
    assert proof.last_bits.endswith("several threads share the rows")


def test_a_narrow_layer_is_refused_by_the_strict_model(fake_ranks):
    with strict_bits():
        verdict = judge(layer_of(NARROW, fake_ranks), tokens(NARROW))
    assert isinstance(verdict, Left)
    assert verdict.reason is Reason.MAY_ROUND
    assert "elements apart" in verdict.detail


def test_the_recording_model_tells_of_what_the_strict_one_refuses_and_of_no_more(fake_ranks):
    with recorded_bits():
        narrow = judge(layer_of(NARROW, fake_ranks), tokens(NARROW))
        halves = judge(layer_of(NARROW, fake_ranks, torch.bfloat16), tokens(NARROW, torch.bfloat16))
    assert isinstance(narrow, RowProof)
    assert "elements apart" in narrow.last_bits
    assert halves.last_bits == ""  # of two bytes every product rounds alike: no vector is filled


def test_a_kept_proof_is_of_the_model_that_was_in_use(fake_ranks):
    layer, x = layer_of(NARROW, fake_ranks), tokens(NARROW)
    with bits_by(KernelBits()):
        assert isinstance(judge(layer, x), RowProof)
    with strict_bits():
        assert isinstance(judge(layer, x), Left)


def test_attention_on_a_cpu_is_told_unless_heads_are_known_to_round_alike(fake_ranks):
    x = torch.randn(4, 6, 16)
    layer = SplitAttention(16, 8, 4, 8, fake_ranks)
    with bits_by(KernelBits()):
        assert told(report_of(layer, x, attention_chunks=2))
        assert not told(report_of(layer, x, attention_chunks=1))
        assert report_of(layer, x, attention_chunks="auto").num_chunks == 2
    with recorded_bits():
        assert not told(report_of(layer, x, attention_chunks=2))
        assert told(report_of(SplitAttention(16, 8, 4, 5, fake_ranks), x, attention_chunks=2))


def test_this_process_has_the_strict_model_and_a_block_ends_with_the_one_before():
    assert isinstance(bits(), CpuBits) and bits().refuses
    with recorded_bits():
        assert not bits().refuses
    assert bits().refuses


def values(rank, width):
    """Run a layer of this width eagerly and compiled, as users do; return what differs, and how."""
    del rank
    group, found = torch.distributed.group.WORLD, []
    eager, other = layer_of(width, group), layer_of(width, group)
    with bits_by(KernelBits()):
        options = {"megamoe.codegen": "fx", "megamoe.chunks": 2}
        compiled = torch.compile(other, backend="megamoe", fullgraph=True, options=options)
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(37, width, generator=draw)
        for function, layer in ((eager, eager), (compiled, other)):
            leaf = x.clone().requires_grad_()
            output = function(leaf)
            output.square().sum().backward()
            found.append([output.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
    return [((a - b).norm() / a.norm()).item() for a, b in zip(*found, strict=True)]


def test_values_of_a_narrow_layer_agree_within_last_bits(mirrored_ranks):
    for errors in mirrored_ranks.run(values, NARROW):
        assert max(errors) <= BOUND_OF_LAST_BITS * torch.finfo(torch.float32).eps, errors


def test_ranks_of_pools_have_the_strict_model(mirrored_ranks):
    assert all(mirrored_ranks.run(refuses))


def refuses(rank):
    del rank
    return bits().refuses
