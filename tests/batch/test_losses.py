"""Losses made of sums over the batch are those of the whole, their terms added up by part."""

import pytest
import torch
import torch.distributed as dist

from moe_compile.testing.mirrored_rank import become_mirrored
from tests.batch.drawn_blocks import DTYPE, EXPERTS, FORMS, WIDTH, DrawnBlock
from tests.batch.test_drawn_blocks import in_parts, same

PARTS, POSITIONS = (3, 2), 4
SHARES = [size / sum(PARTS) for size in PARTS]


class WithLosses(DrawnBlock):
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
    forms = {name: choices[0] for name, choices in FORMS.items()}
    return kind(["attention", "norm", "experts"], forms, "compare", 2, dist.group.WORLD, POSITIONS)


def drawn():
    own = torch.Generator().manual_seed(0)
    return torch.randn(2, sum(PARTS), POSITIONS, WIDTH, generator=own).to(DTYPE)


def gradients(block, x):
    return {"input": x.grad, **{name: p.grad for name, p in block.named_parameters()}}


def compiled(block, x, reports):
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return in_parts(block, len(PARTS), reports)(x)


@pytest.mark.parametrize("is_symbol", [False, True])
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


def test_they_are_those_of_one_pass_but_for_the_order_of_sums():
    x, _ = drawn()
    _, loss, squares = compiled(made(WithLosses), x, [])
    _, expected, whole = made(WithLosses)(x)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(squares, whole)


def test_a_loss_that_tokens_read_or_that_is_no_sum_leaves_the_graph_whole():
    x, _ = drawn()
    for kind in (AddedTo, Mixed):
        reports = []
        compiled(made(kind), x, reports)
        assert not reports[0].applied
