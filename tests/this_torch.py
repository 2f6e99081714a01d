"""What the installed torch captures of a program, found out by trying: older releases do less."""

import functools
import importlib.util

import pytest
import torch
from torch._dynamo.exc import UserError
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from moe_compile.ops import host_copies


def has_hooks():
    """Whether hooks on tensors are in its graphs: before, no compiler could run such a graph."""
    return importlib.util.find_spec("torch._higher_order_ops.register_hook") is not None


def has_host_copies():
    """Whether torch has operators that copy a tensor to host memory beside compute."""
    try:
        return importlib.util.find_spec(host_copies.MODULE) is not None
    except ModuleNotFoundError:  # nor the package of the module
        return False


@functools.cache
def has_autocast_by_functions():
    """Whether autocast may be switched by a function, not by a `with` alone."""

    def program(x):
        torch.set_autocast_enabled("cpu", False)
        return x + 1

    torch._dynamo.reset()
    try:
        torch.compile(program, backend="eager", fullgraph=True)(torch.ones(1))
    except torch._dynamo.exc.Unsupported:
        return False
    return True


@functools.cache
def ends_graphs_at_lists():
    """Whether a list that is indexed by a number of a tensor ends the graph, not the trace."""

    def program(x, place):
        return x.split(1)[place.tolist()[0]]

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        try:
            compiled(torch.ones(2), torch.tensor([1]))
        except GuardOnDataDependentSymNode:
            return False
        except UserError:
            return True
    raise AssertionError("this torch traces it")


@functools.cache
def fills_memory_by_read_sizes():
    """Whether memory of a size may be filled by a tensor as long as numbers that are read add up.

    So the backward of an `autograd.Function` that exchanges rows fills memory like the rows'.
    """

    def program(x, sizes):
        return torch.zeros_like(x).copy_(x.new_ones(sum(sizes.tolist())))

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        try:
            compiled(torch.ones(12), torch.tensor([5, 7]))
        except (GuardOnDataDependentSymNode, UserError, torch._dynamo.exc.Unsupported):
            return False
    return True


def runs_exchanges_without_gradients():
    """Whether eager mode has `all_to_all_single_autograd` where no gradient is asked for."""
    operator = torch.ops._c10d_functional_autograd.all_to_all_single.default
    return operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU) or (
        operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeExplicitAutograd)
    )


def need(*abilities):
    """Reason a test of what this torch does not capture."""
    for ability in abilities:
        if not ability():
            pytest.skip(f"this torch does not capture it: {ability.__name__}")
