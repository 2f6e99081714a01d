"""What the proof takes for granted of an index it cannot follow is checked on sampled counts."""

import contextlib

import pytest
import torch
from torch.utils._sympy.functions import FloorDiv, Max

from moe_compile.graph.query import source_place
from moe_compile.journal.reasons import Reason
from moe_compile.proof.count_run import Unevaluable, draw_samples, large_samples
from moe_compile.proof.operator_call import Claim
from moe_compile.proof.sampled_counts import SampledRows
from moe_compile.regions.count_facts import CountFacts
from moe_compile.regions.regions import RowProof
from moe_compile.regions.row_domain import Labels, Segment, Selected, UnknownIndex
from tests.layers import STYLES, GroupedExperts
from tests.proof.test_row_orders import put_back, verdict_on
from tests.proof.verdicts import judge, layer_of, tokens
from tests.slow_parameters import slow_but


def runs(m, x, c):
    return torch.searchsorted(c.cumsum(0), torch.arange(x.shape[0]), right=True)


def sorted_by(key, **options):
    """Return experts whose rows are sorted by `key` of their run, in a way not followed."""

    def body(m, x, c):
        perm = torch.argsort(key(m, runs(m, x, c), c), stable=True, **options)
        return put_back(perm, m.product(x[perm], m.totals(c)))

    return body


def shifted_by_the_busiest(m, r, c):
    return (r % m.local + (c.max() > 2)) % m.local


def by_label_then(place):
    """Return experts whose rows are sorted by label, then by a function of their place."""

    def body(m, x, c):
        at = torch.arange(x.shape[0])
        perm = torch.argsort(runs(m, x, c) % m.local * 512 + place(m, at), stable=True)
        return put_back(perm, m.product(x[perm], m.totals(c)))

    return body


def left_out_beyond(most, onto):
    """Return experts with whom rows beyond the first `most` of a run go to a row behind all."""

    def body(m, x, c):
        place = torch.arange(x.shape[0]) - (c.cumsum(0) - c)[runs(m, x, c)]
        perm = torch.argsort(runs(m, x, c) % m.local, stable=True)
        index = torch.where(place[perm] < most, perm, -1)
        padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
        out = onto(padded, padded.shape)
        out[index, :] = m.product(padded[index], m.totals(c))
        return out[:-1]

    return body


def added_beyond(most):
    """Return the same with rows added to zeros, those beyond to a row behind all."""

    def body(m, x, c):
        place = torch.arange(x.shape[0]) - (c.cumsum(0) - c)[runs(m, x, c)]
        perm = torch.argsort(runs(m, x, c) % m.local, stable=True)
        index = torch.where(place[perm] < most, perm, x.shape[0])
        padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
        y = m.product(padded[index], m.totals(c))
        return torch.zeros_like(padded).index_add(0, index, y)[:-1]

    return body


def back_by_inverse(inverse, most=2**40):
    """Return experts whose rows go back by the inverse of an index that is not followed."""

    def body(m, x, c):
        place = torch.arange(x.shape[0]) - (c.cumsum(0) - c)[runs(m, x, c)]
        perm = torch.argsort(runs(m, x, c) % m.local, stable=True)
        index = torch.where(place[perm] < most, perm, 0)
        return m.product(x[index], m.totals(c))[inverse(index)]

    return body


def inverse_written(index):
    inverse = torch.empty_like(index)
    inverse[index] = torch.arange(index.shape[0])
    return inverse


def back_beside_padding(inverse):
    """Return the same where one of two rows of padding is chosen twice and the other never."""

    def body(m, x, c):
        at = torch.arange(x.shape[0] + 2)
        run = torch.searchsorted(c.cumsum(0), at - 1, right=True)
        perm = torch.argsort(run % m.local, stable=True)
        index = torch.where(perm == x.shape[0] + 1, 0, perm)
        zeros = x.new_zeros(1, x.shape[1])
        rows = torch.cat([zeros, x, zeros])[index].relu()
        return rows[inverse(index)][1:-1]

    return body


INVERSES = [lambda index: torch.argsort(index, stable=True), inverse_written]


def added_to_one(m, x, c):
    """Every row is added to the first."""
    first = runs(m, x, c) * 0
    return torch.zeros_like(x).index_add(0, first, m.product(x[first], m.totals(c)))


def runs_by_rounded_ends(dtype):
    def body(m, x, c):
        ends = c.cumsum(0).to(dtype).long()
        run = torch.searchsorted(ends, torch.arange(x.shape[0]), right=True)
        perm = torch.argsort(run.clamp(max=len(c) - 1) % m.local, stable=True)
        return put_back(perm, m.product(x[perm], m.totals(c)))

    return body


def at_most_128_of_a_run(m, x, c):
    """Rows beyond the 128th of a run are labelled the last expert's."""
    run = runs(m, x, c)
    place = torch.arange(x.shape[0]) - (c.cumsum(0) - c)[run]
    perm = torch.argsort(torch.where(place < 128, run % m.local, m.local - 1), stable=True)
    return put_back(perm, m.product(x[perm], m.totals(c)))


FALSE = {
    "ends in bfloat16": runs_by_rounded_ends(torch.bfloat16),
    "ends in float16": runs_by_rounded_ends(torch.float16),
    "ends in int16": runs_by_rounded_ends(torch.int16),
    "at most 128 rows of a run": at_most_128_of_a_run,
    "falling experts, rising groups": sorted_by(lambda m, r, c: r % m.local, descending=True),
    "rows in the order received": sorted_by(lambda m, r, c: r // m.local),
    "shifted where counts are large": sorted_by(shifted_by_the_busiest),
    "experts swapped": sorted_by(lambda m, r, c: (r % m.local) ^ 1),
    "all alike": sorted_by(lambda m, r, c: r * 0),
    "an expert's rows by their place among all": by_label_then(lambda m, at: at % 7),
    "an expert's rows backwards": by_label_then(lambda m, at: -at),
}


@pytest.mark.parametrize("case", FALSE)
def test_an_index_that_disagrees_with_the_group_sizes_is_refused(fake_ranks, case):
    """The proof believed that an index it could not follow agrees with the group sizes."""
    verdict = verdict_on(FALSE[case], fake_ranks)
    assert getattr(verdict, "reason", verdict) is Reason.PREMISE_FALSE, verdict


@pytest.mark.parametrize("onto", [torch.Tensor.new_empty, torch.Tensor.new_zeros])
@pytest.mark.parametrize("most", [3, 4_096])
def test_an_index_that_leaves_rows_out_is_refused(fake_ranks, most, onto):
    """It may send them home as zeros."""
    verdict = verdict_on(left_out_beyond(most, onto), fake_ranks)
    assert not isinstance(verdict, RowProof), verdict


@pytest.mark.parametrize("body", [added_beyond(3), added_beyond(4_096), added_to_one])
def test_an_index_that_adds_rows_to_others_is_refused(fake_ranks, body):
    verdict = verdict_on(body, fake_ranks)
    assert not isinstance(verdict, RowProof), verdict


@pytest.mark.parametrize("inverse", INVERSES)
def test_rows_may_go_back_by_the_inverse_of_an_index(fake_ranks, inverse):
    verdict = verdict_on(back_by_inverse(inverse), fake_ranks)
    assert isinstance(verdict, RowProof) and verdict.sampled, verdict
    verdict = verdict_on(back_by_inverse(inverse, most=4_096), fake_ranks)
    assert not isinstance(verdict, RowProof), verdict
    verdict = verdict_on(back_beside_padding(inverse), fake_ranks)
    assert not isinstance(verdict, RowProof), verdict


def test_rows_may_be_added_to_zeros_where_each_is_once(fake_ranks):
    """By where runs start, as torchtitan's dispatcher orders rows, or by places among an expert's,
    as Switch Transformers do."""
    verdict = verdict_on(added_beyond(2**40), fake_ranks)
    assert isinstance(verdict, RowProof) and verdict.sampled, verdict


@pytest.mark.parametrize("onto", [torch.Tensor.new_empty, torch.Tensor.new_zeros])
def test_rows_may_go_back_onto_zeros_where_none_is_left_out(fake_ranks, onto):
    """DeepSpeed's AutoEP writes them so."""
    verdict = verdict_on(left_out_beyond(2**40, onto), fake_ranks)
    assert isinstance(verdict, RowProof) and verdict.sampled, verdict


def test_a_true_premise_is_proven_and_said_to_be_sampled(fake_ranks):
    proof = verdict_on(sorted_by(lambda m, r, c: r % m.local), fake_ranks)
    assert isinstance(proof, RowProof), proof
    assert proof.sampled == 208


def test_what_is_followed_is_not_sampled(fake_ranks):
    proof = judge(layer_of(GroupedExperts, fake_ranks), tokens())
    assert proof.sampled == 0


@torch.library.custom_op("megamoe_tests::opaque_order", mutates_args=())
def opaque_order(counts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


@opaque_order.register_fake
def _(counts, rows):
    return torch.empty_like(rows)


def ordered_by_a_kernel(m, x, c):
    perm = torch.argsort(opaque_order(c, torch.arange(x.shape[0])), stable=True)
    return put_back(perm, m.product(x[perm], m.totals(c)))


def test_a_kernel_that_cannot_run_here_is_refused(fake_ranks):
    verdict = verdict_on(ordered_by_a_kernel, fake_ranks)
    assert getattr(verdict, "reason", verdict) is Reason.PREMISE_UNCHECKED, verdict


def descending(m, x, c):
    """Order rows by the distance of their labels from the largest one that came."""
    ids = m.expert_of_rows(x, c)
    perm = torch.argsort(ids.max() - ids, stable=True)
    return put_back(perm, x[perm] * 2)


def test_what_fails_for_a_chunk_without_rows_is_refused(fake_ranks):
    """Rows of others hid it: the rank had some, and one of its chunks none."""
    verdict = verdict_on(descending, fake_ranks)
    assert getattr(verdict, "reason", verdict) is Reason.FAILS_WITHOUT_ROWS, verdict


def facts_of(num_ranks, num_local):
    facts = CountFacts(num_ranks, num_local, num_ranks * num_local)
    facts.set_root(
        *[
            [sum(side[r * num_local : (r + 1) * num_local]) for r in range(num_ranks)]
            for side in (facts.received, facts.sent)
        ]
    )
    return facts


def test_few_counts_are_tried_in_every_small_vector():
    facts = facts_of(2, 2)
    vectors = {tuple(s[r.length] for r in facts.root) for s in draw_samples(facts, 0)}
    assert len(vectors) == 4**4


def test_drawn_counts_hold_zeros_skew_and_experts_without_rows():
    facts = facts_of(4, 4)
    samples = list(draw_samples(facts))
    assert len(samples) == 200
    vectors = [[s[r.length] for r in facts.root] for s in samples]
    assert [0] * 16 in vectors
    assert any(max(v) > 32 for v in vectors)
    assert any(sum(v[0::4]) == 0 < sum(v) for v in vectors)
    assert samples == list(draw_samples(facts))  # the same on every rank


def test_large_counts_are_beyond_what_short_types_hold():
    vectors = [[s[r.length] for r in facts_of(4, 4).root] for s in large_samples(facts_of(4, 4))]
    assert max(map(sum, vectors)) > torch.finfo(torch.float16).max
    assert any(max(v) > 5_000 > 20 * sum(sorted(v)[:-1]) for v in vectors)
    assert any(min(v) == max(v) > 256 for v in vectors)


FORMS = {
    "as many": (lambda n: n, True),
    "three more": (lambda n: n + 3, True),
    "eight at least": (lambda n: Max(n, 8), True),
    "rounded up": (lambda n: FloorDiv(n + 7, 8) * 8, True),
    "of eight at least, rounded up": (lambda n: FloorDiv(Max(n, 8) + 7, 8) * 8, True),
    "rounded up from three more": (lambda n: FloorDiv(n + 10, 8) * 8, True),
    "one less": (lambda n: n - 1, False),
    "rounded down": (lambda n: FloorDiv(n, 8) * 8, False),
    "rounded down if one too many": (lambda n: FloorDiv(n + 6, 8) * 8, False),
    "half": (lambda n: FloorDiv(n + 7, 8) * 4, False),
    "twice": (lambda n: FloorDiv(n + 7, 8) * 16, False),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_permutation", [True, False])
def test_groups_with_padding_have_room_by_the_form_of_their_size(form, is_permutation):
    facts = facts_of(2, 2)
    rows = Selected(UnknownIndex(is_permutation=is_permutation), facts.root)
    size, has_room = FORMS[form]
    needed = facts.rows_of(1)
    expected = size(needed) == needed if is_permutation else has_room
    assert facts.has_room_for(size(needed), 1, rows) is expected


def test_a_size_that_counts_make_negative_cannot_be_tried():
    facts = facts_of(2, 2)
    order = (Segment("rows", 1 - facts.received[0], 0),)
    claim = Claim(0, torch.tensor([7]), Labels(order, (7,)))
    for count, holds in ((0, True), (2, False)):
        rows = SampledRows(facts, {**next(draw_samples(facts)), facts.received[0]: count})
        with contextlib.nullcontext() if holds else pytest.raises(Unevaluable, match="negative"):
            rows.check(claim, claim.tensor)


def test_rows_compared_with_each_other_are_tried_on_fewer_rows(fake_ranks):
    """70,000 rows would take gigabytes."""

    def body(m, x, c):
        label = runs(m, x, c) % m.local
        before = (label[None] < label[:, None]).sum(1)
        alike = ((label[None] == label[:, None]).tril(-1)).sum(1)
        perm = torch.argsort(before + alike, stable=True)
        return put_back(perm, m.product(x[perm], m.totals(c)))

    proof = verdict_on(body, fake_ranks)
    assert isinstance(proof, RowProof), proof
    assert proof.sampled == 204


def written(node):
    """Return the call and the user's line: tracers number nodes in other ways for few tokens."""
    return node.target, source_place(node)


@pytest.mark.parametrize("style", slow_but(STYLES[:3:2], STYLES), ids=lambda s: s.__name__)
def test_the_verdict_is_the_same_for_few_tokens_and_none(fake_ranks, style):
    """A rank without tokens read 0 for the rows it sends, and refused alone."""
    layer = layer_of(style, fake_ranks)
    many = judge(layer, tokens())
    for tokens_here in (0, 1, 2, 5) if style is GroupedExperts else (0,):
        few = judge(layer, tokens()[:tokens_here].detach())
        assert isinstance(few, RowProof), few
        assert [*map(written, few.sliceable)] == [*map(written, many.sliceable)]
        rows = [[(*written(n), e) for n, e in proof.expert_rows] for proof in (few, many)]
        assert rows[0] == rows[1]
        assert few.sampled == many.sampled
