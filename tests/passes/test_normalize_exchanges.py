"""Collectives in the form the passes know: arguments by position, but for those by name alone."""

import pytest
import torch
from torch.distributed._functional_collectives import all_to_all_single_autograd

from moe_compile.graph.query import is_launch, overload_name
from tests.capture import dynamo_graphs

C10D = torch.ops._c10d_functional


def launches_of(program):
    (gm,) = dynamo_graphs(program, torch.ones(4, 4))
    return [n for n in gm.graph.nodes if is_launch(n)]


def test_what_is_given_by_name_is_placed(fake_ranks):
    group = fake_ranks.group_name

    def program(x):
        y = C10D.all_reduce(x, group_name=group, reduce_op="sum")
        return C10D.wait_tensor(all_to_all_single_autograd(y, [2, 2], [2, 2], fake_ranks))

    for launch in launches_of(program):
        assert launch.args[-1] == group and not launch.kwargs
    assert launches_of(program)[0].args[1] == "sum"


def test_what_is_taken_by_name_alone_stays_so(fake_ranks):
    """The gathered tensor became a fourth argument of a function that takes three."""

    def program(x):
        out = x.new_empty(8, 4)
        gathered = C10D.all_gather_into_tensor_out(
            x, group_size=2, group_name=fake_ranks.group_name, out=out
        )
        return C10D.wait_tensor(gathered)

    (launch,) = launches_of(program)
    assert launch.args[1:] == (2, fake_ranks.group_name)
    assert [*launch.kwargs] == ["out"]


class WaitsAndDoubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return C10D.wait_tensor(x) * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return C10D.wait_tensor(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class WaitsAndHalvesTheGradient(Waits):
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


class WaitsAndKeepsTheGradient(Waits):
    @staticmethod
    def backward(ctx, gradient):
        return None


class WaitsForARow(Waits):
    @staticmethod
    def forward(ctx, x):
        return C10D.wait_tensor(x)[0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(4, 4)


FUNCTIONS = [
    Waits, WaitsAndDoubles, WaitsAndHalvesTheGradient, WaitsAndKeepsTheGradient, WaitsForARow
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_only_a_function_that_waits_and_no_more_is_a_wait(fake_ranks, function):
    """Any function of the program that read such a launch was replaced by a wait."""

    def program(x):
        launch = torch.ops._c10d_functional_autograd.all_to_all_single
        return function.apply(launch(x, [2, 2], [2, 2], fake_ranks.group_name))

    gm, *_ = dynamo_graphs(program, torch.ones(4, 4, requires_grad=True))
    (launch,) = [n for n in gm.graph.nodes if is_launch(n)]
    is_plain = overload_name(launch).startswith("_c10d_functional::")
    assert is_plain is (function is Waits)


class WaitsBesideAnother(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, other):
        return C10D.wait_tensor(x), other.view_as(other)

    @staticmethod
    def backward(ctx, gradient, of_other):
        return gradient, of_other


class SendsTheGradientElsewhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, other):
        return C10D.wait_tensor(x), other.sum()

    @staticmethod
    def backward(ctx, gradient, of_sum):
        return None, gradient


@pytest.mark.parametrize("function", [WaitsBesideAnother, SendsTheGradientElsewhere])
def test_a_function_of_two_tensors_is_no_wait(fake_ranks, function):
    """Every tensor that it returned became the awaited one."""

    def program(x):
        launch = torch.ops._c10d_functional_autograd.all_to_all_single
        return function.apply(launch(x, [2, 2], [2, 2], fake_ranks.group_name), x)

    gm, *_ = dynamo_graphs(program, torch.ones(4, 4, requires_grad=True))
    (launch,) = [n for n in gm.graph.nodes if is_launch(n)]
    assert not overload_name(launch).startswith("_c10d_functional::")
