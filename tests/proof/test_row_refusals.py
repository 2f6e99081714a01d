"""What is not understood, or not row by row, is refused, with the reason and the line."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_compile.journal.reasons import Reason
from tests.layers import GroupedExperts, LoopExperts
from tests.proof.verdicts import TOP_K, WIDTH, judge, layer_of, tokens


class Refusable(GroupedExperts):
    """Plain grouped experts around one step that must not be chunked."""

    before = after = staticmethod(lambda layer, rows, received: rows)

    def __init__(self, *args):
        super().__init__(*args)
        self.gain = nn.Parameter(torch.ones(WIDTH, dtype=self.w1.dtype))
        self.scale = nn.Parameter(torch.ones((), dtype=self.w1.dtype))
        self.mix = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=self.w1.dtype))

    def experts(self, rows, received):
        out = super().experts(self.before(self, rows, received), received)
        return self.after(self, out, received)


def by_expert(layer, rows, received):
    return rows[torch.argsort(layer.expert_of_rows(rows, received), stable=True)]


def position_in_expert(layer, rows, received):
    start = torch.cumsum(received, 0) - received
    return torch.arange(rows.shape[0]) - torch.repeat_interleave(
        start, received, output_size=rows.shape[0]
    )


def kept_rows(layer, rows, received):
    keep = torch.nonzero(position_in_expert(layer, rows, received) < 4).squeeze(1)
    return torch.zeros_like(rows).index_copy(0, keep, rows[keep])


def labels_of_rows_twice(layer, rows, received):
    """Rows stand twice, each time with another label; only the last was remembered."""
    first, again = torch.zeros_like(received), torch.ones_like(received)
    labels = torch.cat([first, again + (torch.arange(received.numel()) % 2)])
    labels = labels.repeat_interleave(received.repeat(2), output_size=2 * rows.shape[0])
    key = (torch.arange(2 * received.numel()) // received.numel()).repeat_interleave(
        received.repeat(2), output_size=2 * rows.shape[0]
    )
    perm = torch.argsort(key, stable=True)
    both = torch.cat([rows, rows])[perm] + layer.w1[:, :, 0][labels[perm]]
    return both[: rows.shape[0]] + both[rows.shape[0] :]


REFUSED = {
    "mean over all rows": (lambda m, x, c: x - x.mean(0), Reason.ROWS_MIXED),
    "running sum over rows": (lambda m, x, c: torch.cumsum(x, 0), Reason.ROWS_MIXED),
    "rows reversed": (lambda m, x, c: x.flip(0), Reason.ROWS_MIXED),
    "attention of rows to rows": (lambda m, x, c: (x @ x.T).softmax(-1) @ x, Reason.ROWS_MIXED),
    "softmax over rows": (lambda m, x, c: x.softmax(0), Reason.ROWS_MIXED),
    "sum of two orders": (lambda m, x, c: x + by_expert(m, x, c), Reason.ROWS_MIXED),
    "half of the rows": (lambda m, x, c: x[: x.shape[0] // 2], Reason.ROWS_MIXED),
    "shared norm weight": (
        lambda m, x, c: F.rms_norm(x, (WIDTH,), m.gain),
        Reason.SHARED_PARAMETER,
    ),
    "scalar scale": (lambda m, x, c: x * m.scale, Reason.SHARED_PARAMETER),
    "matrix for all experts": (lambda m, x, c: x @ m.mix, Reason.SHARED_PARAMETER),
    "frozen matrix for all": (lambda m, x, c: x @ torch.ones_like(m.mix), Reason.SHARED_PARAMETER),
    "divided by a count": (lambda m, x, c: x / c.sum(), Reason.VALUE_FROM_COUNTS),
    "divided by the rows": (lambda m, x, c: x / x.shape[0], Reason.VALUE_FROM_COUNTS),
    "root of the rows": (lambda m, x, c: x * x.shape[0] ** -0.5, Reason.VALUE_FROM_COUNTS),
    "capacity mask": (
        lambda m, x, c: x * (position_in_expert(m, x, c) < 4)[:, None],
        Reason.VALUE_FROM_COUNTS,
    ),
    "weight of the busiest": (
        lambda m, x, c: x * m.w1.index_select(0, c.argmax().view(1) % 4)[0, :, 0],
        Reason.VALUE_FROM_COUNTS,
    ),
    "column by a count": (
        lambda m, x, c: x * x.index_select(1, c.max().view(1) % 4),
        Reason.VALUE_FROM_COUNTS,
    ),
    "rows behind one another in memory": (
        lambda m, x, c: x * (x.new_zeros(WIDTH, x.shape[0]).t() + x).sum(1, keepdim=True),
        Reason.MAY_ROUND,
    ),
    "every dimension of size one": (
        lambda m, x, c: (x[:, None] * 0.5).squeeze(), Reason.UNKNOWN_OPERATOR,
    ),
    "labels of rows that stand twice": (labels_of_rows_twice, Reason.ROWS_FROM_OUTSIDE),
    "capacity by index": (kept_rows, Reason.ROWS_OUT_OF_ORDER),
    "dropout": (lambda m, x, c: F.dropout(x, 0.1), Reason.RANDOM),
    "noise": (lambda m, x, c: x + torch.randn_like(x), Reason.RANDOM),
    "host read": (lambda m, x, c: x * x.sum().item(), Reason.HOST_READ_OF_ROWS),
    "branch of rows": (lambda m, x, c: torch.linalg.qr(x).Q, Reason.UNKNOWN_OPERATOR),
    "left by expert": (by_expert, Reason.ROWS_OUT_OF_ORDER),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_row_by_row_is_refused(fake_ranks, case):
    step, reason = REFUSED[case]

    class Case(Refusable):
        after = staticmethod(step)

    verdict = judge(layer_of(Case, fake_ranks), tokens())
    assert getattr(verdict, "reason", verdict) is reason, verdict


class OtherGroups(GroupedExperts):
    """Grouped GEMM over rows never permuted: its groups are not the experts'."""

    def experts(self, rows, received):
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        return torch._grouped_mm(rows, self.w1 @ self.w2, offs=offs)


class Descending(GroupedExperts):
    """Rows sorted by falling expert, groups by rising expert."""

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True, descending=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        out = torch._grouped_mm(rows[perm], self.w1 @ self.w2, offs=offs)
        return torch.zeros_like(out).index_copy(0, perm, out)


class SmallGroups(GroupedExperts):
    """Groups of at most four rows, permuted in a way not followed."""

    def experts(self, rows, received):
        runs = torch.searchsorted(received.cumsum(0), torch.arange(rows.shape[0]), right=True)
        perm = torch.argsort(runs % self.local, stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0).clamp(max=4), 0).int()
        out = torch._grouped_mm(rows[perm], self.w1 @ self.w2, offs=offs)
        return torch.zeros_like(out).index_copy(0, perm, out)


class TiedExperts(LoopExperts):
    """Two experts share one weight."""

    def experts(self, rows, received):
        counts, self._counts = self._counts, None
        shared = self.w1[0] @ self.w2[0]
        return torch.cat([part @ shared for part in torch.split(rows, counts)])


@pytest.mark.parametrize(
    "style", [OtherGroups, Descending, SmallGroups, TiedExperts], ids=lambda s: s.__name__
)
def test_a_weight_must_be_read_by_the_rows_of_its_expert(fake_ranks, style):
    verdict = judge(layer_of(style, fake_ranks), tokens())
    assert getattr(verdict, "reason", verdict) is Reason.SHARED_PARAMETER


class WeightsFromOutside(GroupedExperts):
    """Multiplies the received rows by a tensor as long as the rows that were sent."""

    def forward(self, x):
        self._scores = torch.ones(TOP_K * x.shape[0], 1, dtype=x.dtype).cumsum(0)
        return super().forward(x)

    def experts(self, rows, received):
        scores, self._scores = self._scores, None
        return super().experts(rows * scores, received)


def test_a_tensor_from_outside_with_a_value_per_row_is_refused(fake_ranks):
    verdict = judge(layer_of(WeightsFromOutside, fake_ranks), tokens())
    assert getattr(verdict, "reason", verdict) is Reason.ROWS_FROM_OUTSIDE


class PaddedSplits(GroupedExperts):
    """Every rank gets one row more than its experts are sent."""

    def splits(self, counts, received):
        sent, got = super().splits(counts, received)
        return [s + 1 for s in sent], [g + 1 for g in got]


def test_split_sizes_must_be_sums_of_counts(fake_ranks):
    verdict = judge(layer_of(PaddedSplits, fake_ranks), tokens())
    assert getattr(verdict, "reason", verdict) is Reason.NO_COUNT_EXCHANGE


def test_a_refusal_names_the_operator_and_the_users_line(fake_ranks):
    class Case(Refusable):
        after = staticmethod(lambda layer, rows, received: rows - rows.mean(0))

    verdict = judge(layer_of(Case, fake_ranks), tokens())
    assert verdict.detail.startswith("`.mean()`: ")
    assert "rows - rows.mean(0)" in verdict.detail


class SharesAScale(torch.Tensor):
    """A weight that divides all rows of a product by the largest of them, as by one fp8 scale."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype
        )

    def __init__(self, data):
        self.data_of_own = data

    def __tensor_flatten__(self):
        return ["data_of_own"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return SharesAScale(inner["data_of_own"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch._grouped_mm:
            rows, weight = args
            scale = rows.abs().amax()
            return torch._grouped_mm(rows / scale, weight.data_of_own, **kwargs) * scale
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        own = [a.data_of_own if isinstance(a, cls) else a for a in args]
        made = func(*own, **(kwargs or {}))
        keeps = func in (torch.ops.aten.detach.default, torch.ops.aten.transpose.int)
        return cls(made) if keeps else made


class OfAClassOfItsOwn(Refusable):
    """The weights of the gate are of such a class."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.w1 = nn.Parameter(SharesAScale(self.w1.detach()))


class TransposesIt(Refusable):
    """So are these, and the product reads a view of them."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.turned = nn.Parameter(SharesAScale(self.w1.detach().mT.contiguous()))
        del self.w1

    @property
    def w1(self):
        return self.turned.transpose(-2, -1)


@pytest.mark.parametrize("layer", [OfAClassOfItsOwn, TransposesIt])
def test_a_product_with_a_weight_of_a_class_of_its_own_is_not_trusted(fake_ranks, layer):
    verdict = judge(layer_of(layer, fake_ranks), tokens())
    assert verdict.reason is Reason.UNKNOWN_OPERATOR
    assert "_grouped_mm" in verdict.detail and "SharesAScale" in verdict.detail
