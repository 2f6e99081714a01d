"""What the installed torch captures of a program, found out by trying: older releases do less."""

import functools
import importlib.util

import pytest
import torch


def has_hooks():
    """Whether hooks on tensors are in its graphs: before, no compiler could run such a graph."""
    return importlib.util.find_spec("torch._higher_order_ops.register_hook") is not None


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


def need(*abilities):
    """Reason a test of what this torch does not capture."""
    for ability in abilities:
        if not ability():
            pytest.skip(f"this torch does not capture it: {ability.__name__}")
