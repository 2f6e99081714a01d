"""Losses made of sums over the batch are those of the whole, their terms added up by part."""

import pytest
import torch
import torch.nn.functional as F

from moe_compile.testing.mirrored_rank import become_mirrored
from passes.normalize_exchanges import NormalizeExchanges
from passes.split_batch import SplitBatch
from tests.batch_layers import POSITIONS, WIDTH, Block
from tests.capture import state
from tests.layers import GroupedExperts
from tests.slow_parameters import slow_but

DTYPE, EXPERTS = torch.bfloat16, 4
PARTS = (3, 2)
SHARES = [size / sum(PARTS) for size in PARTS]


class WithLosses(Block):
    """Returns a load-balancing loss and the sum of squared logits too, as routers are trained."""

    def pieces(self, x):
        """Return the output, the mean of each expert's scores, its load, and the sum of squares."""
        y, rows = super().forward(x), x.flatten(0, 1)
        logits = (rows @ self.moe.router).float()
        chosen = torch.topk(logits, 1, -1)[1]
        load = (chosen == torch.arange(EXPERTS)).sum(0)
        return y, torch.softmax(logits, -1).mean(0), load, (logits * logits).sum()

    def forward(self, x):
        y, mean, load, squares = self.pieces(x)
        return y, self.balance(mean, load), squares

    def balance(self, mean, load):
        return EXPERTS * (mean * load / load.sum()).sum()


class OfTorch(Block):
    """Returns losses of torch and a loss of each sequence's own load beside the output."""

    def forward(self, x, target):
        y = super().forward(x)
        sums, counted = self.sums(y, target)
        return y, torch.stack([*(loss / counted for loss in sums[:2]), *self.means(y), sums[2]])

    def sums(self, y, target):
        """Return losses that are sums, and by how many targets the first two are averaged."""
        logits = (y @ self.moe.router).float()
        options = {"ignore_index": -1, "reduction": "sum"}
        by_token = F.cross_entropy(logits.flatten(0, 1), target.flatten(), **options)
        smooth = F.cross_entropy(logits.mT, target, label_smoothing=0.1, **options)
        return (by_token, smooth, F.mse_loss(y.float(), y.detach().float() * 2, reduction="sum")), (
            target >= 0
        ).sum()

    def means(self, y):
        logits = (y @ self.moe.router).float()
        scores, (size, positions) = torch.softmax(logits, -1), y.shape[:2]
        load = torch.zeros(size, EXPERTS)
        load.scatter_add_(1, logits.topk(2, -1)[1].view(size, -1), torch.ones(size, positions * 2))
        own = (load.div_(positions) * scores.mean(1)).sum(1).mean()
        return (
            torch.logsumexp(logits, -1).square().mean(),
            F.smooth_l1_loss(y.float(), y.detach().float() * 2),
            own,
        )


class ByTorch(OfTorch):
    """Has the averages over targets made by torch."""

    def forward(self, x, target):
        y = Block.forward(self, x)
        logits = (y @ self.moe.router).float()
        by_token = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1)
        smooth = F.cross_entropy(logits.mT, target, ignore_index=-1, label_smoothing=0.1)
        squares = F.mse_loss(y.float(), y.detach().float() * 2, reduction="sum")
        return y, torch.stack([by_token, smooth, *self.means(y), squares])


class OverSequences(Block):
    """Its loss takes sequences for classes."""

    def forward(self, x):
        y = super().forward(x)
        return y, F.cross_entropy(y.float().transpose(0, 1), torch.zeros(y.shape[1:]).long())


class PerPosition(Block):
    """Its loss divides by another size than that of the batch."""

    def forward(self, x):
        y = super().forward(x)
        scores = F.log_softmax(y.float(), -1).transpose(0, 1)
        return y, F.kl_div(scores, torch.ones_like(scores) / WIDTH, reduction="batchmean")


class AddedTo(WithLosses):
    """Adds its loss to the output, which then is of all sequences."""

    def forward(self, x):
        y, loss, _ = super().forward(x)
        return y + loss.to(y.dtype)


class Mixed(WithLosses):
    """Its loss is a maximum: no sum of what parts have."""

    def forward(self, x):
        y, loss, squares = super().forward(x)
        return y, loss, squares + x.float().amax((0, 1, 2))


def made(kind):
    become_mirrored()
    return kind(GroupedExperts, DTYPE, experts=EXPERTS)


def in_parts(block, parts, reports):
    """Return `block` run by its Dynamo graph, once `split_batch` has been at it."""

    def split(gm, example_inputs):
        NormalizeExchanges().run(gm.graph, state())
        reports.append(SplitBatch().run(gm.graph, state(batch_parts=parts)))
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(block, backend=split, fullgraph=True)


def same(theirs, ours):
    if theirs is None or ours is None:
        return theirs is ours
    return torch.equal(theirs, ours)


def drawn():
    own = torch.Generator().manual_seed(0)
    return torch.randn(2, sum(PARTS), POSITIONS, WIDTH, generator=own).to(DTYPE)


def gradients(block, x):
    return {"input": x.grad, **{name: p.grad for name, p in block.named_parameters()}}


def compiled(block, x, reports):
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return in_parts(block, len(PARTS), reports)(x)


@pytest.mark.parametrize("is_symbol", slow_but([True], [False, True]))
def test_losses_are_of_the_sums_of_all_parts(is_symbol):
    """Each part goes back from what it gave to the sums, by the losses' gradients at these."""
    (x, gradient), reports = drawn(), []
    ours, given = made(WithLosses), x.clone().requires_grad_()
    if is_symbol:
        torch._dynamo.mark_dynamic(given, 0)
    y, loss, squares = compiled(ours, given, reports)
    assert reports[0].applied
    torch.autograd.backward([y, loss, squares], [gradient, None, None])

    theirs, cut = made(WithLosses), x.clone().requires_grad_()
    parts = [theirs.pieces(part) for part in cut.split(PARTS)]
    outputs, means, loads, sums = zip(*parts, strict=True)
    total = sum(m.detach() * s for m, s in zip(means, SHARES, strict=True)).requires_grad_()
    expected = theirs.balance(total, sum(loads))
    expected.backward()
    of_sums = torch.ones(())
    for output, mean, part, share, squared in zip(
        outputs, means, gradient.split(PARTS), SHARES, sums, strict=True
    ):
        torch.autograd.backward([output, mean, squared], [part, total.grad * share, of_sums])

    assert torch.equal(y, torch.cat(outputs))
    assert torch.equal(loss, expected) and torch.equal(squares, sum(sums))
    found, wanted = gradients(ours, given), gradients(theirs, cut)
    assert [name for name in wanted if not same(wanted[name], found[name])] == []


def test_losses_of_torch_are_those_of_all_targets_added_up_by_part():
    """Each part goes back from its own sums, divided by what the whole counts."""
    (x, gradient), reports = drawn(), []
    target = torch.randint(-1, EXPERTS, x.shape[:2], generator=torch.Generator().manual_seed(1))
    target[: PARTS[0] - 1] = -1  # parts do not have as many
    ours, given = made(ByTorch), x.clone().requires_grad_()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        y, losses = in_parts(ours, len(PARTS), reports)(given, target)
    assert reports[0].applied
    torch.autograd.backward([y, losses.sum()], [gradient, None])

    theirs, cut = made(OfTorch), x.clone().requires_grad_()
    whole, counted, of_parts = [], (target >= 0).sum(), []
    for part, own, back, share in zip(
        cut.split(PARTS), target.split(PARTS), gradient.split(PARTS), SHARES, strict=True
    ):
        output = Block.forward(theirs, part)
        (by_token, smooth, squares), _ = theirs.sums(output, own)
        means = [mean * share for mean in theirs.means(output)]
        of_parts.append(torch.stack([by_token / counted, smooth / counted, *means, squares]))
        torch.autograd.backward([output, of_parts[-1].sum()], [back, None])
        whole.append(output)
    assert torch.equal(y, torch.cat(whole))
    torch.testing.assert_close(losses, sum(of_parts))
    found, wanted = gradients(ours, given), gradients(theirs, cut)
    assert [name for name in wanted if not same(wanted[name], found[name])] == []
    torch.testing.assert_close(losses, made(ByTorch)(x, target)[1])


def test_they_are_those_of_one_pass_but_for_the_order_of_sums():
    x, _ = drawn()
    _, loss, squares = compiled(made(WithLosses), x, [])
    _, expected, whole = made(WithLosses)(x)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(squares, whole)


def test_a_loss_that_tokens_read_or_that_is_no_sum_leaves_the_graph_whole():
    x, _ = drawn()
    for kind in (AddedTo, Mixed, OverSequences, PerPosition):
        reports = []
        compiled(made(kind), x, reports)
        assert not reports[0].applied
