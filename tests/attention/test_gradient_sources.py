"""What ranks compare of collectives whose gradients may be sent otherwise."""

import pytest
import torch
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from moe_compile.plan.plan_digest import send_one_input
from tests.capture import dynamo_graphs


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (lambda w, a, frozen: w, True),
        (lambda w, a, frozen: (w * 2 + frozen).t().contiguous().to(torch.bfloat16), True),
        (lambda w, a, frozen: torch.split(w, 2)[1], True),
        (lambda w, a, frozen: w + a @ a, False),
        (lambda w, a, frozen: w + w.sin(), False),
        (lambda w, a, frozen: frozen, False),
    ],
)
def test_one_input_alone_is_told_from_what_is_computed_of_several(fake_ranks, sent, expected):
    def program(w, a, frozen):
        return all_gather_tensor_autograd(sent(w, a, frozen), 0, fake_ranks) * a.sum()

    learned, frozen = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
    (gm,) = dynamo_graphs(program, learned, learned.detach().requires_grad_(), frozen)
    assert send_one_input(gm.graph) == [expected]
