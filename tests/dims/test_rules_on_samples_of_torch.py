"""Nothing wrong is said of what torch has samples of for its own tests."""

import sys
import types
import unittest

import pytest
import torch
from torch.utils import _pytree as pytree

from moe_compile.dims.factors import Lost
from tests.dims.perturbed import Claims

MOST_SAMPLES, MOST_ELEMENTS = 8, 500
NOT_RUN = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AssertionError)
"""What samples raise of arguments that these operators do not take."""


def operators_of_torch(monkeypatch):
    """Return what torch knows of its operators, without what its tests compare texts by."""
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase
    monkeypatch.setitem(sys.modules, "expecttest", sys.modules.get("expecttest", stub))
    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415

    found = [info for info in op_db if torch.float64 in info.supported_dtypes("cpu")]
    return [info for info in found if "empty" not in info.name]  # whatever memory had


def of_tensors(info, sample):
    """Return a function of the tensors of a sample, and these."""
    leaves, form = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*given):
        now = dict(zip(at, given, strict=True))
        filled = [now.get(i, leaf) for i, leaf in enumerate(leaves)]
        first, args, kwargs = pytree.tree_unflatten(filled, form)
        return info.op(first, *args, **kwargs)

    return call, [leaves[i].detach() for i in at]


@pytest.mark.exhaustive
def test_nothing_wrong_is_said_of_any_operator_of_torch(monkeypatch):
    wrong, followed = [], set()
    for info in operators_of_torch(monkeypatch):
        for number, sample in enumerate(info.sample_inputs("cpu", torch.float64)):
            function, given = of_tensors(info, sample)
            if number >= MOST_SAMPLES or sum(one.numel() for one in given) > MOST_ELEMENTS:
                continue
            try:
                said = Claims(function, given)
                wrong += [(info.name, number, *one) for one in said.wrong()]
            except (Lost, *NOT_RUN):
                continue
            followed.add(info.name)
    assert not wrong
    assert len(followed) > 300
