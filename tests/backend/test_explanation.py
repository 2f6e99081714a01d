"""What `explain` says of a layer is what the passes do when it runs under `torch.compile`."""

import pytest
import torch
import torch.distributed as dist

import moe_compile
from moe_compile import backend
from moe_compile.report.process_report import ProcessReport
from tests.attention_layers import HeadMixing, SplitAttention
from tests.gathering_layers import Gathering
from tests.layers import GroupedExperts, SharedAndBias
from tests.legacy_layers import Bincount, RepeatedLabels
from tests.loop_layers import Masked, SlicesAssigned
from tests.slow_parameters import exhaustive_but

ROUTED = (GroupedExperts, SharedAndBias, SlicesAssigned, Masked, RepeatedLabels, Bincount)
OF_UNKNOWN_LENGTH = {Masked: 2, RepeatedLabels: 2}
"""Layers that have a break between dispatch and combine; chunks they are in once none is there."""
OTHERS = {
    SplitAttention: ((32, 4, 4, 8), (2, 8, 32)),
    HeadMixing: ((32, 4, 4, 8), (2, 8, 32)),
    Gathering: ((16, 32, 2), (32, 16)),
}
"""The layer -> sizes it is made with, and those of its input."""
SLOW = (GroupedExperts, RepeatedLabels, SplitAttention, Gathering)


class All(ProcessReport):
    """Keeps compilations without a region, too."""

    def _keep(self, compilation):
        self.compilations.append(compilation)


def facts(report):
    regions = [(r["where"], r["num_chunks"], r["verdict"], r["remarks"]) for r in report["regions"]]
    attention = [(a["where"], a["num_chunks"], a["verdict"]) for a in report["attention"]]
    return regions, attention, report["exchanges"], set(report["graph_breaks"])


def of_rank(rank, style):
    """Return what `explain` says, what a run does, and chunks with captured lengths."""
    sizes, shape = OTHERS.get(style, ((16, 24, 8, 2), (24, 16)))
    dtype = torch.bfloat16 if style in ROUTED else torch.float32
    torch.manual_seed(rank)
    layer, x = style(*sizes, dist.group.WORLD), torch.randn(shape).to(dtype).requires_grad_()
    said = moe_compile.explain(layer, x, chunks=2)
    own, backend.REPORT = backend.REPORT, All()
    try:
        options = {"megamoe.chunks": 2, "megamoe.codegen": "fx"}
        torch.compile(layer, backend=backend.megamoe, options=options)(x)
        done = backend.REPORT.as_dict()
    finally:
        backend.REPORT = own
    instead = said.if_captured
    chunks = [r["num_chunks"] for r in instead.report["regions"]] if instead else None
    return facts({**said.report, "graph_breaks": said.breaks}), facts(done), chunks


@pytest.mark.parametrize("style", exhaustive_but(SLOW, (*ROUTED, *OTHERS), [Masked]))
def test_a_layer_is_explained_as_it_runs(mirrored_ranks, style):
    """Rows taken by masks, and labels of unknown length, were said to run in two chunks."""
    for said, done, chunks in mirrored_ranks.run(of_rank, style):
        assert said == done
        if style in OF_UNKNOWN_LENGTH:
            assert not any(region[1] > 1 for region in said[0])
            assert chunks == [OF_UNKNOWN_LENGTH[style]]
        elif style is GroupedExperts:
            assert [region[1] for region in said[0]] == [2] and chunks is None
