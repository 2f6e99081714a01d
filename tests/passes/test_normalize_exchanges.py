"""Collectives in the form the passes know: arguments by position, but for those by name alone."""

import torch
from torch.distributed._functional_collectives import all_to_all_single_autograd

from moe_compile.graph.query import is_launch
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
