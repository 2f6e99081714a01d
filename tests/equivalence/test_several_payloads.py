"""Layers that send several tensors, exchange twice or sort whole chunks: in chunks, as eagerly."""

import pytest
import torch

from moe_compile.report.process_report import REPORT
from moe_compile.testing.equivalence import differing_tensors
from moe_compile.testing.strategies import MoECase, RoutingPattern
from tests.equivalence.test_layers import build, inputs
from tests.megatron_layers import (
    MegatronLayer,
    ScaledRows,
    TwoBack,
    TwoBackInTurn,
    TwoStacks,
    TwoSteps,
)
from tests.slow_parameters import slow_but

NUM_REGIONS = {
    MegatronLayer: 1, ScaledRows: 1, TwoBack: 1, TwoBackInTurn: 1, TwoSteps: 2, TwoStacks: 2,
}  # fmt: skip


def case_of(style):
    """Return two steps: some tokens, then a step in which a rank has none or others."""
    return MoECase(
        num_ranks=2, width=32, hidden=32, num_experts=6, top_k=2, chunks=2, dtype=torch.float32,
        routing=RoutingPattern.FIRST_RANK, tokens=((9, 14), (0, 7)),
        seed=list(NUM_REGIONS).index(style),
    )  # fmt: skip


def run(rank, case, style):
    """Return what differs from eager and passes that failed, and the verdicts on the regions."""
    torch._dynamo.reset()
    known = len(REPORT.compilations)
    options = {"megamoe.chunks": case.chunks, "megamoe.strict": True}
    # `masked_select` has as many elements as the mask says
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        differing = differing_tensors(lambda: build(case, style), inputs(case, rank), options)
    compilations = REPORT.compilations[known:]
    differing += [f"dropped: {one}" for c in compilations for one in c.dropped]
    return differing, [[r.verdict for r in c.regions] for c in compilations if c.regions]


@pytest.mark.parametrize("style", slow_but([TwoBackInTurn], NUM_REGIONS))
def test_ranks_without_rows_or_tokens_compute_as_eagerly(two_ranks, style):
    for rank, (differing, verdicts) in enumerate(two_ranks.run(run, case_of(style), style)):
        assert not differing, f"rank {rank}: {differing}"
        assert verdicts and all(v == ["chunked"] * NUM_REGIONS[style] for v in verdicts)
