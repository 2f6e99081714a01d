"""Graphs of programs on a GPU that need not be there: the host reads integers of its vectors."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.scheduled_layers import c10d, one_rank_group


def traced(program, *vectors):
    """Return the graph of `program` for vectors on a GPU."""
    one_rank_group()
    with FakeTensorMode(shape_env=ShapeEnv()):
        inputs = [torch.empty(v.shape, dtype=v.dtype, device="cuda") for v in vectors]
        return make_fx(program, tracing_mode="symbolic")(*inputs)


def to_list(vector):
    return [vector.select(0, i).item() for i in range(vector.shape[0])]


def exchange(rows, got, sent):
    for size in (*got, *sent):
        torch._check(size >= 0)
    group = one_rank_group()
    return c10d.wait_tensor(c10d.all_to_all_single(rows, [sum(got)], [sum(sent)], group))
