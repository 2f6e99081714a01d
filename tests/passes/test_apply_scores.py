"""Scores multiply before the last product where that is proven to be the same but for rounding."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_graphs
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.read_regions import work_of_experts
from moe_compile.cost.sizes import NominalSizes
from moe_compile.errors import RegionRefused
from moe_compile.graph.query import is_all_to_all, is_integer, is_launch, tensor_of
from moe_compile.journal.entries import PassReport
from moe_compile.journal.reasons import Reason
from moe_compile.ops.row_sums import TOKEN_SUMS
from passes.apply_scores import BOUND, ApplyScores
from tests.capture import dynamo_graphs
from tests.dispatch_layers import Around, InOrder, InOrderWeighted, SharedInOrderWeighted
from tests.layers import LoopExperts, SegmentStarts, SortedChunks
from tests.megatron_layers import MegatronLayer
from tests.slow_parameters import one_per_reason, slow_but

TOKENS = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
ASKED = {"hardware": "cpu", "chunks": 1, "apply_scores": "before_down"}


def rewritten(program, **options):
    """Return the graph, what was applied and skipped, and the state."""
    graphs = dynamo_graphs(program, TOKENS)
    state, _ = rewrite(graphs[0], MegaMoEConfig(**(ASKED | options)))
    mine = [r for _, r in state.journal.records if r.pass_name == ApplyScores.name]
    reports = [r for r in mine if isinstance(r, PassReport)]
    applied = tuple(line for report in reports for line in report.applied)
    skipped = tuple(verdict for report in reports for verdict in report.skipped)
    return graphs, applied, skipped, state


def layer(style, group):
    return style(16, 24, 8, 2, group)


def exchanged(graph):
    """Return type and width of the rows that exchanges send, in the order launched."""
    sent = [
        tensor_of(n.all_input_nodes[0]) for n in graph.nodes if is_launch(n) and not is_integer(n)
    ]
    return [(t.dtype, t.shape[1] if t.dim() > 1 else 1) for t in sent]


BF16, F32 = torch.bfloat16, torch.float32
FORMS = [
    (Around, "1 product, exchanged as bfloat16", BF16),
    (InOrderWeighted, "1 product, exchanged as float32", F32),
    (LoopExperts, "4 products, exchanged as bfloat16", BF16),
    (SegmentStarts, "1 product, exchanged as bfloat16", BF16),
    (SortedChunks, "1 product, exchanged as bfloat16", BF16),
    (SharedInOrderWeighted, "1 product, exchanged as float32", F32),
]


@pytest.mark.parametrize(("style", "said", "dtype"), slow_but(FORMS[:2], FORMS))
def test_scores_travel_behind_the_rows_and_back_come_rows_alone(fake_ranks, style, said, dtype):
    (gm,), applied, skipped, state = rewritten(layer(style, fake_ranks))
    line = f"the scores of region 0, before {said} (bounded: {BOUND})"
    assert (applied, skipped) == ((line,), ())
    assert exchanged(gm.graph) == [(BF16, 16), (dtype, 1), (BF16, 16)]
    (one,) = state.experts
    assert [beside.launch.all_input_nodes[0].name for beside in one.found.region.beside]
    assert [plan.name for plan in state.plan.rewrites] == ["apply_scores"]


def test_every_chunk_has_its_scores_and_its_sums_have_no_weights(fake_ranks):
    program = layer(InOrderWeighted, fake_ranks)
    (gm,), applied, _, _ = rewritten(program, chunks=2, numerics="bounded")
    assert applied
    assert sum(map(is_all_to_all, gm.graph.nodes)) == 1 + 2 * 3  # counts; rows, scores, rows back
    (total,) = gm.graph.find_nodes(op="call_function", target=TOKEN_SUMS)
    assert total.args[2] is None


def test_every_part_of_the_batch_has_its_scores(fake_ranks):
    _, applied, _, state = rewritten(layer(Around, fake_ranks), batch_parts=2)
    assert state.is_in_parts and len(applied) == 2


def test_the_exchange_of_scores_has_a_price_forward_and_backward(fake_ranks):
    _, _, _, state = rewritten(layer(Around, fake_ranks))
    (one,) = state.experts
    work = work_of_experts(one.found.region, one.found.proof, state.hardware)
    for phase in (work.forward, work.backward):
        assert [each.exchange for each in phase].count("beside") == 1


def test_a_checkpointed_layer_has_it_too(fake_ranks):
    inner = layer(Around, fake_ranks)
    _, applied, _, _ = rewritten(lambda x: checkpoint(inner, x, use_reentrant=False))
    assert len(applied) == 1


@pytest.mark.parametrize(
    "options",
    [{"apply_scores": "model"}, {"disable_passes": ("apply_scores",)}],
    ids=["model", "disabled"],
)
def test_nothing_changes_unless_it_is_asked_for(fake_ranks, options):
    program = layer(Around, fake_ranks)
    before = str(dynamo_graphs(program, TOKENS)[0].graph)
    (gm,), applied, skipped, _ = rewritten(program, **options)
    assert (applied, skipped, str(gm.graph)) == ((), (), before)


class Biased(Around):
    """A bias stands behind the last product."""

    def experts(self, rows, received):
        return super().experts(rows, received) + self.w2[0, 0]


class Activated(Around):
    """What the last product makes is squared, and so would be its scores."""

    def experts(self, rows, received):
        return super().experts(rows, received).square()


class Written(Around):
    """The same in place."""

    def experts(self, rows, received):
        return super().experts(rows, received).sigmoid_()


class OfRows(Around):
    """Scores are made of the rows that come back."""

    def total(self, x, order, out, scores):
        weights = out.float().mean(1, keepdim=True).to(out.dtype)
        return torch.zeros_like(x).index_add(0, order // self.top_k, out * weights)


class OneForAll(Around):
    """The factor is one number."""

    def total(self, x, order, out, scores):
        return torch.zeros_like(x).index_add(
            0, order // self.top_k, out * scores[:1, :1].to(x.dtype)
        )


class Rescaled(Around):
    """Scores are written in place once rows are sent."""

    def experts(self, rows, received):
        self.scores.mul_(2)
        return super().experts(rows, received)

    def route(self, x):
        scores, chosen = super().route(x)
        self.scores = scores.clone()
        return self.scores, chosen


class NoGradient(Around):
    """Experts run without gradients, scores have one."""

    def experts(self, rows, received):
        with torch.no_grad():
            return super().experts(rows, received)


class ReadTwice(Around):
    """Something else reads what the experts make."""

    def experts(self, rows, received):
        out = super().experts(rows, received)
        self.seen = out.detach().sum()
        return out

    def forward(self, x):
        y, seen, self.seen = super().forward(x), self.seen, None
        return y + seen.to(y.dtype)


class NoPermutation(InOrderWeighted):
    """Rows go to places that no sort gave."""

    def total(self, x, order, out, scores):
        return super().total(x, order.flip(0).abs(), out, scores)


class PutInOrder(Around):
    """Rows are put in order by an operator that scores do not follow: they stay as received."""

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        x = torch.zeros_like(rows).index_copy(0, torch.argsort(perm), rows)
        h = torch.relu(torch._grouped_mm(x, self.w1, offs=offs))
        return torch._grouped_mm(h, self.w2, offs=offs)[torch.argsort(perm)]


LEFT = {
    Biased: Reason.NOT_LINEAR,
    InOrder: Reason.ALREADY_DONE,
    OfRows: Reason.ROWS_READ,
    Rescaled: Reason.WRITTEN,
    NoGradient: Reason.STATE_CHANGES,
    ReadTwice: Reason.ESCAPES,
    NoPermutation: Reason.NO_SLOTS,
    PutInOrder: Reason.NOT_PROVEN,
    Activated: Reason.NOT_LINEAR,
    Written: Reason.NOT_LINEAR,
    OneForAll: Reason.NOT_BY_ROW,
    MegatronLayer: Reason.ALREADY_DONE,
}


@pytest.mark.parametrize("style", one_per_reason(LEFT))
def test_what_is_not_proven_stays_and_says_why(fake_ranks, style):
    program = layer(style, fake_ranks)
    (gm,), applied, (left, *others), _ = rewritten(program)
    assert (applied, left.reason, others) == ((), LEFT[style], [])
    assert left.candidate == "the scores of region 0"
    assert not any(width == 1 for _, width in exchanged(gm.graph)) or style is MegatronLayer


def test_strict_raises_for_it(fake_ranks):
    with pytest.raises(RegionRefused, match=r"megamoe.apply_scores was requested .*`add` at"):
        rewritten(layer(Biased, fake_ranks), strict=True)


def saved_bytes(program, **options):
    """Return the bytes that the backward pass takes from the forward one."""
    (gm, *_), _, _, state = rewritten(program, **options)
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    forward, backward = (module.graph for module in trace_graphs(gm, inputs, state))
    sizes = NominalSizes(state.nominal_sizes)
    for graph in (forward, backward):
        sizes.learn(graph)
    taken = {node.name for node in backward.find_nodes(op="placeholder")}
    made = [n for n in forward.nodes if n.op == "call_function" and n.name in taken]
    return sum(
        sizes.nbytes(tensor_of(n)) for n in made if not is_launch(n) and tensor_of(n) is not None
    )


ROWS_KEPT = [("bounded", False, 2), ("exact", True, 2), ("exact", False, 4)]


@pytest.mark.parametrize(
    ("numerics", "is_checkpointed", "itemsize"), slow_but(ROWS_KEPT[:2], ROWS_KEPT)
)
def test_rows_that_came_back_are_not_saved(fake_ranks, numerics, is_checkpointed, itemsize):
    """64 rows of 16 numbers, in float32 where the model weights them; a score for each may be.

    Under activation checkpointing they are among the exchanges that are saved.
    """
    inner = layer(InOrderWeighted, fake_ranks)

    def program(x):
        return checkpoint(inner, x, use_reentrant=False) if is_checkpointed else inner(x)

    options = {"numerics": numerics, "equal_tokens": True}
    most = saved_bytes(program, apply_scores="model", **options)
    assert most - saved_bytes(program, **options) >= 64 * 16 * itemsize - 64 * 4
