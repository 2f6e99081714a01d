"""A list that is indexed by a number of a tensor is no error with host reads in graphs."""

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from moe_compile import untraced_reads
from moe_compile.errors import InvalidConfig
from moe_compile.testing.rank_pool import forget_compiled

FX = {"megamoe.codegen": "fx"}


def sorted_parts(x, order):
    """Megatron-Core 0.16 sorts what it received by expert so."""
    parts = x.split(2)
    return torch.cat([parts[i] for i in order.tolist()]) * 2


def layer(x, order):
    return sorted_parts(x + 1, order).sin() + 1


def inputs(parts):
    x = torch.arange(2.0 * parts, requires_grad=True)
    return x, torch.arange(parts).flip(0)


@pytest.fixture(autouse=True)
def fresh():
    forget_compiled()


def test_the_function_runs_eagerly_and_others_are_compiled(caplog):
    """The trace ended in GuardOnDataDependentSymNode, where plain aot_eager runs."""
    compiled = torch.compile(layer, backend="megamoe", options=FX)
    for parts in (4, 4, 3):
        (x, order), (y, _) = inputs(parts), inputs(parts)
        found, expected = compiled(x, order), layer(y, order)
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(found, expected)
        assert torch.equal(x.grad, y.grad)
    assert not torch._dynamo.config.suppress_errors
    (line,) = {r.getMessage() for r in caplog.records if r.name == untraced_reads.LOG.name}
    assert "test_untraced_reads.py" in line
    assert "order.tolist()" in line


def test_other_errors_are_raised():
    def failing(x):
        raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program"):
        torch.compile(failing, backend="megamoe", options=FX)(torch.ones(4))
    with pytest.raises(InvalidConfig, match="chunkz"):
        torch.compile(torch.sin, backend="megamoe", options={"megamoe.chunkz": 1})(torch.ones(4))
    assert not torch._dynamo.config.suppress_errors


def test_code_that_was_compiled_before_does_not_begin_to_run_eagerly():
    """Other ranks may still run what was compiled, rewritten."""

    def sorted_where_long(x, order):
        return sorted_parts(x, order) if x.shape[0] > 8 else x * 2

    compiled = torch.compile(sorted_where_long, backend="megamoe", options=FX)
    compiled(*inputs(2))
    with pytest.raises(GuardOnDataDependentSymNode):
        compiled(*inputs(6))


def test_a_whole_graph_has_no_eager_function():
    compiled = torch.compile(layer, backend="megamoe", options=FX, fullgraph=True)
    with pytest.raises(GuardOnDataDependentSymNode):
        compiled(*inputs(4))
    torch.compile(torch.sin, backend="megamoe", options=FX)(torch.ones(2))
    assert not torch._dynamo.config.suppress_errors
