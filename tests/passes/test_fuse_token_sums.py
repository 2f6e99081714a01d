"""Sums per token are one operator where rows are put in order for them, in any of the forms."""

import operator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_compile.backend import rewrite
from moe_compile.config import MegaMoEConfig
from moe_compile.journal.entries import PassReport
from moe_compile.journal.reasons import Reason
from moe_compile.ops.row_sums import TOKEN_SUMS
from passes.fuse_token_sums import BOUND, FuseTokenSums
from tests import dispatch_layers
from tests.capture import dynamo_graphs
from tests.dispatch_layers import InOrder, InOrderWeighted, SharedInOrderWeighted
from tests.slow_parameters import slow_but

FUSED = [
    InOrderWeighted,
    InOrder,
    dispatch_layers.IntoEmpty,
    dispatch_layers.WeightedInOrder,
    dispatch_layers.ByInverse,
    dispatch_layers.ByEinsum,
]
WRITES = {"bmm", "einsum", "sum_dim", "index_copy_", "setitem", "permute_rows"}
TOKENS = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)


def rewritten(program, **options):
    """Return the graphs, the sums of them all, what was said of these, and whether none changed."""
    graphs = dynamo_graphs(program, TOKENS)
    before = [str(gm.graph) for gm in graphs]
    config = MegaMoEConfig(**({"hardware": "cpu", "chunks": 1, "numerics": "bounded"} | options))
    state, compilation = rewrite(graphs[0], config)
    sums = [n for gm in graphs for n in gm.graph.find_nodes(op="call_function", target=TOKEN_SUMS)]
    mine = (r for _, r in state.journal.records if r.pass_name == FuseTokenSums.name)
    reports = [r for r in mine if isinstance(r, PassReport)]
    applied = tuple(line for report in reports for line in report.applied)
    skipped = tuple(verdict for report in reports for verdict in report.skipped)
    is_as_before = before == [str(gm.graph) for gm in graphs]
    return graphs, sums, (applied, skipped, compilation.rewrites), is_as_before


def layer(style, group):
    return style(16, 24, 8, 2, group)


@pytest.mark.parametrize(
    ("style", "chunks"),
    slow_but(
        [(InOrderWeighted, 2), (dispatch_layers.IntoEmpty, 1)],
        [(style, chunks) for style in FUSED for chunks in (1, 2)],
    ),
)
def test_every_form_becomes_one_operator_on_the_rows_of_each_chunk(fake_ranks, style, chunks):
    (gm,), (total,), said, _ = rewritten(layer(style, fake_ranks), chunks=chunks)
    kind = "sums" if style is InOrder else "weighted sums"
    line = f"the {kind} per token of region 0, k = 2, D = 16 (bounded: {BOUND})"
    assert said == ((line,), (), [f"fuse_token_sums: applied to {line}"])
    rows, order, weights, num_tokens, slots, dtype = total.args
    assert (len(rows), num_tokens, slots) == (chunks, 32, 2)
    assert (weights is None) == (style is InOrder) and dtype.is_floating_point
    after = [n for n in gm.graph.nodes if n > rows[-1]]
    named = {getattr(n.target, "__name__", str(n.target)).split(".")[0] for n in after}
    assert not named & WRITES, named
    assert total in {n for n in gm.graph.nodes if order in n.all_input_nodes}


class OfLast(SharedInOrderWeighted):
    """Those whose rows are sent are the second half of all tokens."""

    def first(self, tokens):
        return tokens.shape[0] // 2


@pytest.mark.parametrize("style", [SharedInOrderWeighted, OfLast], ids=["first", "last"])
def test_sums_of_a_part_of_the_tokens_are_one_operator_and_zeros(fake_ranks, style):
    _, (total,), (applied, *_), _ = rewritten(layer(style, fake_ranks), chunks=2)
    assert len(applied) == 1
    _, order, weights, num_tokens, _, _ = total.args
    first = 16 if style is OfLast else 0
    assert num_tokens == 16 and weights.args[1:] == (0, 2 * first, 32)
    (padded,) = total.users
    assert padded.args[1] == (0, 0, first, 16 - first)
    assert not any(n.target is operator.add for n in order.args[0].all_input_nodes)


def test_a_checkpointed_layer_has_it_too(fake_ranks):
    inner = layer(InOrderWeighted, fake_ranks)
    _, sums, (applied, *_), _ = rewritten(lambda x: checkpoint(inner, x, use_reentrant=False))
    assert len(sums) == len(applied) == 1


@pytest.mark.parametrize(
    "options",
    [{"numerics": "exact"}, {"disable_passes": ("fuse_token_sums",)}],
    ids=["exact", "disabled"],
)
def test_nothing_changes_unless_it_may(fake_ranks, options):
    _, sums, (applied, skipped, lines), is_as_before = rewritten(
        layer(InOrderWeighted, fake_ranks), **options
    )
    assert (sums, applied, skipped, lines, is_as_before) == ([], (), (), [], True)


class ReadTwice(InOrderWeighted):
    """Something else reads the rows."""

    def total(self, x, order, out, scores):
        return super().total(x, order, out, scores) + out.sum()


class NoPermutation(InOrderWeighted):
    """Rows go to places that no sort gave."""

    def total(self, x, order, out, scores):
        return super().total(x, order.flip(0).abs(), out, scores)


class ByOthers(InOrderWeighted):
    """More places than rows: the first row is the last of a token's, whose others have none."""

    shift, memory = 1, torch.zeros

    def total(self, x, order, out, scores):
        ordered = self.memory((x.shape[0] * self.top_k + 2, x.shape[1]), dtype=x.dtype)
        ordered[order + self.shift] = out
        weights = torch.cat([scores, scores[:1]]).reshape(-1, 1, self.top_k)
        by_token = ordered.reshape(-1, self.top_k, x.shape[1])
        return torch.bmm(weights, by_token.float()).to(x.dtype).squeeze(1)[:-1]


class OfSomeIntoEmpty(ByOthers):
    """Tokens without rows are sums of memory that nobody wrote."""

    shift, memory = 2, torch.empty


LEFT = {
    ReadTwice: Reason.ROWS_READ,
    NoPermutation: Reason.NO_SLOTS,
    ByOthers: Reason.NO_SLOTS,
    OfSomeIntoEmpty: Reason.NO_SLOTS,
    dispatch_layers.Around: Reason.NO_SLOTS,
}


@pytest.mark.parametrize("style", slow_but([NoPermutation, ByOthers], LEFT))
def test_what_is_no_sum_of_k_rows_for_each_token_stays_and_says_why(fake_ranks, style):
    _, sums, (applied, (left,), (line,)), is_as_before = rewritten(layer(style, fake_ranks))
    assert (sums, applied, left.reason, is_as_before) == ([], (), LEFT[style], True)
    assert left.candidate == "the sums per token of region 0"
    assert line.startswith(f"fuse_token_sums: left alone {left}. To do: ")
