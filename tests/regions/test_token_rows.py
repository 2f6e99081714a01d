"""Which gathers and sums of tokens are proven, and what in them is not understood."""

import operator

import pytest
import torch
import torch.nn.functional as F

from moe_compile.graph.dependence import Dependence
from moe_compile.journal.reasons import Left, Reason
from moe_compile.regions.token_counts import counts_values
from moe_compile.regions.token_index import TokenIndex
from moe_compile.regions.token_rows import find_token_rows
from passes.detect_regions import DetectRegions
from tests.capture import dynamo_graphs, state
from tests.dispatch_layers import (
    Around,
    InColumns,
    InOrder,
    InOrderWeighted,
    SharedByIndex,
    SharedInOrder,
    SharedInOrderWeighted,
)
from tests.layers import STYLES, GroupedExperts
from tests.slow_parameters import slow_but

WIDTH, HIDDEN, EXPERTS, TOP_K, TOKENS = 16, 32, 8, 2, 32


def found_in(style, group, *, experts=EXPERTS, top_k=TOP_K):
    """Return what is found around the region of a layer of `style`."""
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(style(WIDTH, HIDDEN, experts, top_k, group), x)
    ours = state()
    DetectRegions().run(gm.graph, ours)
    (found,) = ours.found.experts
    return find_token_rows(found.region)


def onto(make_base):
    """Return a layer that adds its rows to what `make_base` makes of the tokens."""

    class Onto(Around):
        def total(self, x, order, out, scores):
            return make_base(x).index_add(0, order // self.top_k, out)

    return Onto


def zeros_added_to(x):
    zeros = torch.zeros_like(x)
    zeros.add_(x)
    return zeros


def zeros_assigned(x):
    zeros = torch.zeros_like(x)
    zeros[:2] = x[:2]
    return zeros


def zeros_written_through_a_view(x):
    zeros = x.new_zeros(x.shape)
    zeros.view(-1)[:2].add_(1)
    return zeros


def zeros_written_by_their_own_call(x):
    base = x * 2
    return torch.zeros(x.shape, out=base)


@torch._dynamo.allow_in_graph
def zeros_like(x):
    return torch.ones_like(x)


@pytest.mark.parametrize(
    "base",
    [
        zeros_added_to,
        zeros_assigned,
        zeros_written_through_a_view,
        zeros_written_by_their_own_call,
    ],
)
def test_zeros_that_are_written_are_no_zeros(fake_ranks, base):
    """They were left out of the sum, with all that had been written to them."""
    assert found_in(onto(base), fake_ranks).reason is Reason.WRITTEN


def test_what_is_called_zeros_by_others_is_a_base_like_any_other(fake_ranks):
    assert found_in(onto(zeros_like), fake_ranks).sums.base is not None


@pytest.mark.parametrize(
    "base",
    [
        torch.zeros_like,
        lambda x: torch.zeros(*x.shape, dtype=x.dtype, device=x.device),
        lambda x: torch.zeros(size=x.shape, dtype=x.dtype),
        lambda x: x.new_zeros(x.shape),
    ],
)
def test_zeros_that_nobody_writes_add_nothing(fake_ranks, base):
    assert found_in(onto(base), fake_ranks).sums.base is None


def summed_by(sum_of, style=InOrder):
    """Return a layer that puts rows in order, and adds them up by `sum_of`."""

    class Summed(style):
        def summed(self, by_token, scores):
            return sum_of(by_token, scores.reshape(-1, 1, self.top_k))

    return Summed


def ordered_in(make, style=InOrder, slots=TOP_K):
    """Return a layer that puts rows in order in what `make` makes, and adds them up."""

    class Ordered(style):
        def total(self, x, order, out, scores):
            z = make(x, slots * x.shape[0])
            z[order] = out
            return self.summed(z.view(x.shape[0], slots, x.shape[1]), scores)

    return Ordered


class ReadBefore(InOrder):
    """The rows of a token are summed before they are there."""

    def total(self, x, order, out, scores):
        z = torch.zeros(self.top_k * x.shape[0], x.shape[1], dtype=x.dtype)
        y = z.view(x.shape[0], self.top_k, x.shape[1]).sum(1)
        z[order] = out
        return y


class WrittenAgain(InOrder):
    """Some of the rows in order are replaced before they are summed."""

    def total(self, x, order, out, scores):
        z = torch.zeros(self.top_k * x.shape[0], x.shape[1], dtype=x.dtype)
        z[order] = out
        by_token = z.view(x.shape[0], self.top_k, x.shape[1])
        z.mul_(2)
        return by_token.sum(1)


def zeros(x, rows):
    return torch.zeros(rows, x.shape[1], dtype=x.dtype)


def wide_zeros(x, rows):
    return torch.zeros(rows, x.shape[1])


@pytest.mark.parametrize(
    "style",
    [
        summed_by(lambda rows, weights: rows.sum(1, dtype=torch.float32)),
        summed_by(lambda rows, weights: rows.sum(1, keepdim=True).squeeze(1)),
        ordered_in(wide_zeros),
        ReadBefore,
        WrittenAgain,
    ],
    ids=["dtype", "keepdim", "wide zeros", "read before", "written again"],
)
def test_a_sum_that_is_not_understood_is_none(fake_ranks, style):
    """Its arguments and its place were not looked at: values were wrong."""
    assert found_in(style, fake_ranks).reason is Reason.NO_SUM


def test_slots_that_no_row_fills_are_not_proven(fake_ranks):
    """Two rows to a token, in four slots: the first half of the tokens gets all of them."""
    style = ordered_in(zeros, slots=2 * TOP_K)
    assert found_in(style, fake_ranks).reason is Reason.OTHER_INDEX


@pytest.mark.parametrize("dim", [1, -2, (1,)])
def test_a_dimension_may_be_counted_from_either_end(fake_ranks, dim):
    style = summed_by(lambda rows, weights: rows.sum(dim))
    assert found_in(style, fake_ranks).rows_per_token == TOP_K


@pytest.mark.parametrize(
    "product",
    [
        lambda rows, weights: torch.bmm(weights, rows.float() * 0.5).squeeze(1),
        lambda rows, weights: (torch.bmm(weights, rows.float()) * 2).squeeze(1),
        lambda rows, weights: torch.bmm(weights, rows.half().float()).squeeze(1),
        lambda rows, weights: torch.bmm(weights, rows.float()).bfloat16().float().squeeze(1),
    ],
    ids=["rows times a number", "sums times a number", "rows rounded", "sums rounded"],
)
def test_a_weighted_sum_with_more_between_is_not_understood(fake_ranks, product):
    """Casts were skipped, and products with a number too."""
    style = summed_by(product, InOrderWeighted)
    assert found_in(style, fake_ranks).reason is Reason.NO_SUM


def test_a_weighted_sum_may_be_taken_in_the_type_of_its_weights(fake_ranks):
    style = summed_by(
        lambda rows, weights: torch.bmm(weights.to(rows.dtype), rows).squeeze(dim=1),
        InOrderWeighted,
    )
    assert found_in(style, fake_ranks).sums.weights is not None


class OtherColumns(InColumns):
    """Columns of a row are gathered of several tokens."""

    def gather(self, x, order, scores):
        index = self.in_columns(order, x)
        return torch.gather(x, 0, (index + torch.arange(x.shape[1])) % x.shape[0])


class FewerColumns(InColumns):
    """The last columns of the rows are not added."""

    def in_columns(self, order, x):
        return (order // self.top_k)[:, None].expand(-1, x.shape[1] - 4)

    def gather(self, x, order, scores):
        return x[order // self.top_k]


class AlongColumns(InColumns):
    """Rows are added to columns, as wide as they are many."""

    def total(self, x, order, out, scores):
        index = self.in_columns(order, x) % x.shape[1]
        return x.new_zeros(index.shape).scatter_add(1, index, out)[: x.shape[0]]


@pytest.mark.parametrize(
    ("style", "reason"),
    [
        (OtherColumns, Reason.NO_GATHER),
        (FewerColumns, Reason.NO_SUM),
        (AlongColumns, Reason.NO_SUM),
    ],
)
def test_indices_that_are_not_one_number_a_row_are_not_understood(fake_ranks, style, reason):
    assert found_in(style, fake_ranks).reason is reason


@pytest.mark.parametrize("equation", ["tkd, tk -> td", "abc,ab->ac"])
def test_an_einsum_of_rows_and_weights_is_a_weighted_sum(fake_ranks, equation):
    style = summed_by(lambda rows, w: torch.einsum(equation, rows, w[:, 0].to(rows.dtype)))
    assert found_in(style, fake_ranks).sums.weights is not None


@pytest.mark.parametrize("equation", ["tkd,tk->dt", "tkd,tk->tk", "tkd,kt->td", "tkd,tk"])
def test_an_einsum_of_another_sum_is_not_understood(fake_ranks, equation):
    def total(rows, w):
        w = w[:, 0].to(rows.dtype)
        return torch.einsum(equation, rows, w.t() if "kt" in equation else w)

    assert found_in(summed_by(total), fake_ranks).reason is Reason.NO_SUM


@torch.library.custom_op("megamoe_tests::index_add", mutates_args=())
def index_add(
    base: torch.Tensor, dim: int, index: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    return base.index_add(dim, index, rows, alpha=3)


@index_add.register_fake
def _(base, dim, index, rows):
    return torch.empty_like(base)


def test_an_operator_of_that_name_is_not_torchs(fake_ranks):
    class OfOthers(Around):
        def total(self, x, order, out, scores):
            zeros = torch.zeros_like(x)
            return torch.ops.megamoe_tests.index_add(zeros, 0, order // self.top_k, out)

    assert found_in(OfOthers, fake_ranks).reason is Reason.NO_SUM


class OneFactorForAll(Around):
    """Tokens' rows are multiplied by a matrix of one number."""

    def gather(self, x, order, scores):
        return super().gather(x, order, scores) * x.new_ones(1, 1)


class OneFactorForAllResults(Around):
    """So are the rows that come back."""

    def total(self, x, order, out, scores):
        return super().total(x, order, out * x.new_ones(1, 1), scores)


@pytest.mark.parametrize("style", [OneFactorForAll, OneFactorForAllResults])
def test_a_factor_without_an_entry_for_each_row_is_not_understood(fake_ranks, style):
    """Rows of the factor would be taken by the index of a row."""
    assert found_in(style, fake_ranks).reason is Reason.NOT_BY_ROW


class OneNumber(Around):
    """Adds one number of each row: sums are no matrix."""

    def total(self, x, order, out, scores):
        return x * x.new_zeros(x.shape[0]).index_add(0, order // self.top_k, out)[:, None]

    def experts(self, rows, received):
        return super().experts(rows, received).sum(-1)


class WholeSums(Around):
    """Its sums are integers."""

    def total(self, x, order, out, scores):
        zeros = torch.zeros_like(x, dtype=torch.int8)
        return zeros.index_add(0, order // self.top_k, out.to(torch.int8)).to(x.dtype)


@pytest.mark.parametrize("style", [OneNumber, WholeSums])
def test_sums_that_are_no_matrix_of_floats_are_none(fake_ranks, style):
    assert found_in(style, fake_ranks).reason is Reason.NO_SUM


def test_an_index_that_is_read_after_a_write_is_another(fake_ranks):
    """Both times it is `order // k`, of another order."""

    class Turned(Around):
        def total(self, x, order, out, scores):
            order.copy_(order.flip(0))
            return torch.zeros_like(x).index_add(0, order // self.top_k, out)

    assert found_in(Turned, fake_ranks).reason is Reason.OTHER_INDEX


def test_rows_are_not_put_in_an_order_that_was_written(fake_ranks):
    """The index was read off the order before that."""

    class Turned(InOrder):
        def total(self, x, order, out, scores):
            order.copy_(order.flip(0))
            return super().total(x, order, out, scores)

    assert isinstance(found_in(Turned, fake_ranks), Left)


def gathered_by(make):
    """Return a layer that gathers rows, and adds them up, by what `make` makes of its order."""

    class Gathered(Around):
        def gather(self, x, order, scores):
            self.index = make(order, scores)
            return x[self.index]

        def total(self, x, order, out, scores):
            return torch.zeros_like(x).index_add(0, self.index, out)

    return Gathered


@pytest.mark.parametrize(
    "make",
    [
        lambda order, _: order.copy_(order // 2) // TOP_K,
        lambda order, _: order.to(torch.int8).long() // TOP_K,
    ],
    ids=["written", "through a type of few numbers"],
)
def test_an_order_that_may_be_no_permutation_proves_no_number_of_rows(fake_ranks, make):
    found = found_in(gathered_by(make), fake_ranks)
    assert (found.rows_per_token, found.mean_rows_per_token) == (None, TOP_K)


class Routes(GroupedExperts):
    """Sends rows to experts whose numbers went through another type."""

    through = torch.int32

    def route(self, x):
        scores, chosen = super().route(x)
        return scores, chosen.to(self.through).long()


class RoutesByBytes(Routes):
    through = torch.uint8


@pytest.mark.parametrize(
    ("style", "is_proven"),
    slow_but([(RoutesByBytes, False)], [(Routes, True), (RoutesByBytes, False)]),
)
def test_numbers_of_experts_that_a_type_does_not_hold_prove_nothing(fake_ranks, style, is_proven):
    """Of 260 experts two numbers become one: a token may have both rows on one rank."""
    assert found_in(style, fake_ranks, experts=260).is_chosen_once is is_proven


def counted_by(count, choices=EXPERTS):
    """Return a layer that counts its experts by `count(flat, number)` and routes to `choices`."""

    class Counted(Routes):
        def route(self, x):
            wide = F.pad(torch.softmax((x @ self.router).float(), -1), (0, choices - EXPERTS))
            return torch.topk(wide, self.top_k, -1)

        def tally(self, flat):
            return count(flat, self.num_experts)

    return Counted


def ones_added(flat, number, one=1, to=0):
    return flat.new_full((number,), to).scatter_add(0, flat, torch.full_like(flat, one))


def on_a_table(flat, number):
    """DeepSeek's way, as transformers has it."""
    table = flat.new_zeros(flat.shape[0] // TOP_K, number)
    table.scatter_(1, flat.view(-1, TOP_K), 1)
    return table.sum(dim=0)


PROVEN = {
    "histc": lambda flat, n: torch.histc(flat.float(), n, 0, n - 1).long(),
    "histc up to the number": lambda flat, n: torch.histc(flat.double(), n, 0, n).to(torch.int32),
    "ones added": ones_added,
    "ones added in place": lambda flat, n: flat.new_zeros(n).index_add_(
        0, flat, torch.ones_like(flat)
    ),
    "one_hot of pairs": lambda flat, n: F.one_hot(flat.view(-1, TOP_K), n).sum((0, 1)).int(),
    "a table of tokens": on_a_table,
    "one by one": lambda flat, n: torch.stack([(flat == e).sum() for e in range(n)]),
}
UNPROVEN = {
    "histc, bins of two": lambda flat, n: torch.histc(flat.float(), n, 0, 2 * n).long(),
    "histc of halves": lambda flat, n: torch.histc(flat.float() / 2, n, 0, n).long(),
    "twos added": lambda flat, n: ones_added(flat, n, 2),
    "ones added to ones": lambda flat, n: ones_added(flat, n, to=1),
    "at most four": lambda flat, n: F.one_hot(flat, n).sum(0).clamp(max=4),
    "added up in eight bits": lambda flat, n: F.one_hot(flat, n).to(torch.int8).sum(0),
    "ones added at others": lambda flat, n: ones_added(flat.flip(0) // 2, n),
}


@pytest.mark.parametrize("form", slow_but(["histc", "histc of halves"], PROVEN | UNPROVEN))
def test_counts_are_those_of_the_chosen_experts_or_prove_nothing(fake_ranks, form):
    found = found_in(counted_by((PROVEN | UNPROVEN)[form]), fake_ranks)
    assert found.is_chosen_once is (form in PROVEN)


@pytest.mark.parametrize(("up_to", "is_proven"), [(0, False), (-1, True)])
def test_a_histogram_with_fewer_bins_than_numbers_is_counted_by_its_last_bin(
    fake_ranks, up_to, is_proven
):
    """A ninth number is in the last bin of two, or left out."""
    style = counted_by(lambda flat, n: torch.histc(flat.float(), n, 0, n + up_to).long(), 9)
    assert found_in(style, fake_ranks).is_chosen_once is is_proven


@pytest.mark.parametrize(("most", "is_proven"), [(EXPERTS, True), (2 * EXPERTS, False)])
def test_integers_that_a_gpu_counts_by_histc_are_counted_without_one(most, is_proven):
    """Torch has no such histogram on a CPU, where choices are tried."""
    graph = torch.fx.Graph()
    scores = graph.placeholder("scores")
    chosen = graph.call_function(
        operator.getitem, (graph.call_function(torch.topk, (scores, TOP_K)), 1)
    )
    flat = graph.call_method("view", (chosen, -1))
    counts = graph.call_function(torch.histc, (flat,), {"bins": EXPERTS, "min": 0, "max": most})
    scores.meta["val"] = torch.randn(TOKENS, EXPERTS)
    chosen.meta["val"] = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    flat.meta["val"], counts.meta["val"] = chosen.meta["val"].view(-1), torch.arange(EXPERTS)
    dependence = Dependence(graph)
    assert counts_values(TokenIndex(frozenset()), counts, chosen, dependence) is is_proven


MADE_BEFORE = torch.arange(TOKENS).repeat(TOP_K)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda order, scores: MADE_BEFORE, None),
        (lambda order, scores: (scores >= scores.mean()).nonzero(as_tuple=True)[0], None),
        (lambda order, scores: torch.cat([order // TOP_K]), TOP_K),
    ],
    ids=["made before the graph", "as many as data tells", "joined"],
)
def test_as_many_rows_on_every_rank_are_proven_by_what_chose_them(fake_ranks, make, expected):
    found = found_in(gathered_by(make), fake_ranks)
    assert (found.rows_per_token, found.mean_rows_per_token) == (None, expected)


@pytest.mark.parametrize("style", slow_but(STYLES[:2], STYLES))
def test_every_style_has_as_many_rows_on_every_rank(fake_ranks, style):
    assert found_in(style, fake_ranks).mean_rows_per_token == TOP_K


# --- a part of the tokens -------------------------------------------------------------------------


SECOND = TOKENS // 2
"""First token of the second half."""


def second_half(style, **changes):
    """Return a layer of `style` that sends rows of its second half, as every other rank does."""
    return type(style.__name__, (style,), {"first": lambda self, x: x.shape[0] // 2, **changes})


@pytest.mark.parametrize(
    "style", slow_but([SharedByIndex], [SharedByIndex, SharedInOrder, SharedInOrderWeighted])
)
def test_the_rows_of_a_part_of_the_tokens_are_known(fake_ranks, style):
    for half, first in ((style, 0), (second_half(style), SECOND)):
        found = found_in(half, fake_ranks)
        assert (found.part.first, found.rows_per_token) == (first, TOP_K)
        assert found.is_chosen_once and found.keeps_order
        assert tuple(found.chosen.meta["example_value"].shape) == (TOKENS // 2, TOP_K)
        assert found.mean_rows_per_token is None  # of all tokens: not every one has rows


def test_all_tokens_are_no_part(fake_ranks):
    assert found_in(InOrder, fake_ranks).part is None


WRONG = {
    "the first half by the numbers of the second": lambda self, chosen: chosen[: TOKENS // 2],
    "one token on": lambda self, chosen: chosen[SECOND + 1 :],
    "counted from the end": lambda self, chosen: chosen[-SECOND:],
    "every other token": lambda self, chosen: chosen[SECOND % 2 :: 2],
    "half of each token": lambda self, chosen: chosen.view(-1, TOP_K // 2)[SECOND : 2 * SECOND],
}


@pytest.mark.parametrize("own", WRONG.values(), ids=WRONG)
def test_rows_of_other_tokens_than_were_chosen_for_are_not_proven(fake_ranks, own):
    """A slice from the end is of those tokens, but not seen to be."""
    found = found_in(second_half(SharedByIndex, own=own), fake_ranks)
    assert (found.part, found.chosen, found.rows_per_token) == (None, None, None)
    assert not found.is_chosen_once
    put_in_order = second_half(SharedInOrder, own=own)
    assert found_in(put_in_order, fake_ranks).reason is Reason.OTHER_INDEX


@pytest.mark.parametrize("shift", [1, TOP_K, -TOP_K])
def test_numbers_of_rows_that_are_moved_on_are_of_other_tokens(fake_ranks, shift):
    class Moved(Around):
        def among_all(self, order, x):
            return order + shift

    found = found_in(Moved, fake_ranks)
    assert (found.part, found.chosen, found.rows_per_token) == (None, None, None)
