"""Layers that send several tensors, exchange twice or sort whole chunks: in chunks, as eagerly."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_compile.report.process_report import REPORT
from moe_compile.testing.equivalence import differing_tensors
from moe_compile.testing.strategies import MoECase, Routing
from tests.equivalence.test_layers import build, inputs
from tests.megatron_layers import (
    MegatronLayer,
    ScaledRows,
    TwoBack,
    TwoBackInTurn,
    TwoHops,
    TwoStacks,
    TwoSteps,
)
from tests.slow_parameters import slow_but

NUM_REGIONS = {
    MegatronLayer: 1, ScaledRows: 1, TwoBack: 1, TwoBackInTurn: 1, TwoSteps: 2, TwoStacks: 2,
}  # fmt: skip
UNEVEN, EMPTY = (9, 14), (0, 7)


def case_of(style, tokens, routing):
    """Return two steps: some tokens, then a step in which a rank has none or others."""
    return MoECase(
        num_ranks=2, width=32, hidden=32, num_experts=6, top_k=2, chunks=2, dtype=torch.float32,
        routing=routing, tokens=tokens, seed=list(NUM_REGIONS).index(style),
    )  # fmt: skip


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def run(rank, case, style, wrap=None, more=None):
    """Return what differs from eager and passes that failed, and the verdicts on the regions."""
    torch._dynamo.reset()
    known = len(REPORT.compilations)
    options = {"megamoe.chunks": case.chunks, "megamoe.strict": True, **(more or {})}

    def made():
        return wrap(build(case, style)) if wrap else build(case, style)

    # `masked_select` has as many elements as the mask says
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        differing = differing_tensors(made, inputs(case, rank), options)
    compilations = REPORT.compilations[known:]
    differing += [f"dropped: {one}" for c in compilations for one in c.dropped]
    return differing, [[r.verdict for r in c.regions] for c in compilations if c.regions]


def check(pool, case, style, **more):
    for rank, (differing, verdicts) in enumerate(pool.run(run, case, style, *more.values())):
        assert not differing, f"rank {rank}: {differing}"
        assert verdicts and all(v == ["chunked"] * NUM_REGIONS[style] for v in verdicts)


@pytest.mark.parametrize("style", slow_but([TwoBackInTurn], NUM_REGIONS))
def test_ranks_without_rows_or_tokens_compute_as_eagerly(two_ranks, style):
    check(two_ranks, case_of(style, (UNEVEN, EMPTY), Routing.FIRST_RANK), style)


@pytest.mark.slow
@pytest.mark.parametrize("style", [MegatronLayer, TwoBack, TwoSteps])
def test_inside_a_checkpoint_they_equal_eager(mirrored_ranks, style):
    check(mirrored_ranks, case_of(style, (UNEVEN,), Routing.SKEWED), style, wrap=Checkpointed)


class Stacked(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.second = layer, type(layer)(32, 32, 6, 2, dist.group.WORLD, torch.float32)

    def forward(self, x):
        return x + self.second(x + self.first(x))


@pytest.mark.slow
@pytest.mark.parametrize("style", [MegatronLayer, TwoStacks])
def test_two_layers_in_one_graph_are_chunked_each(mirrored_ranks, style):
    case = case_of(style, (UNEVEN,), Routing.BALANCED)
    for differing, verdicts in mirrored_ranks.run(run, case, style, Stacked):
        assert not differing
        assert verdicts == [["chunked"] * 2 * NUM_REGIONS[style]]


def hops(rank, num_nodes):
    """Run `TwoHops`; ranks of one node are neighbours. Return differences and verdicts."""
    torch._dynamo.reset()
    num_ranks = dist.get_world_size()
    per_node, known = num_ranks // num_nodes, len(REPORT.compilations)
    nodes = [list(range(n * per_node, (n + 1) * per_node)) for n in range(num_nodes)]
    places = [list(range(p, num_ranks, per_node)) for p in range(per_node)]
    within, across = (
        next(g for g, ranks in [(dist.new_group(r), r) for r in each] if rank in ranks)
        for each in (nodes, places)
    )
    own = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randn(9 + rank, 32, generator=own) for _ in range(2))
    experts = 4 * num_ranks

    def made():
        return TwoHops(32, 32, experts, 2, across, within, torch.float32)

    options = {"megamoe.chunks": 2, "megamoe.strict": True}
    differing = differing_tensors(made, [(x, gradient)], options)
    (said,) = REPORT.compilations[known:]
    return differing, [r.verdict for r in said.regions], [str(u) for u in said.unmatched]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "num_nodes"), [(2, 1), (2, 2), (4, 2)])
def test_of_two_hops_the_inner_one_is_chunked_and_the_outer_one_named(request, ranks, num_nodes):
    pool = request.getfixturevalue("two_ranks" if ranks == 2 else "four_ranks")
    for differing, verdicts, left in pool.run(hops, num_nodes):
        assert not differing
        assert verdicts == ["chunked"]
        (outer,) = left
        assert outer.startswith("region 0: the first of two hops")
        assert "region 1 between" in outer
