"""A list that is indexed by a number of a tensor is no error with host reads in graphs."""

import pytest
import torch
from torch._dynamo.exc import UserError
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from moe_compile.errors import InvalidConfig
from moe_compile.testing.rank_pool import forget_compiled
from moe_compile.torch_quirks import untraceable_guards
from tests.this_torch import ends_graphs_at_lists

FX = {"megamoe.codegen": "fx"}
ENDS_THE_TRACE = (GuardOnDataDependentSymNode, UserError)


def sorted_parts(x, order):
    """Megatron-Core 0.16 sorts what it received by expert so."""
    parts = x.split(2)
    return torch.cat([parts[i] for i in order.tolist()]) * 2


def layer(x, order):
    return sorted_parts(x + 1, order).sin() + 1


def sorted_where_long(x, order):
    return sorted_parts(x, order) if x.shape[0] > 8 else x * 2


def looked_up_where_long(x, order):
    """Dynamo ends no graph inside of `try`, and runs the whole function eagerly."""
    try:
        return x * dict(enumerate(range(8)))[order.tolist()[0]] if x.shape[0] > 8 else x * 2
    except KeyError:
        return x


def inputs(parts):
    x = torch.arange(2.0 * parts, requires_grad=True)
    return x, torch.arange(parts).flip(0)


@pytest.fixture(autouse=True)
def fresh():
    forget_compiled()


by_an_error = pytest.mark.skipif(
    ends_graphs_at_lists(), reason="this torch ends the graph at the list, as without megamoe"
)


cases = pytest.mark.parametrize(
    "where_long",
    [
        pytest.param(sorted_where_long, marks=[by_an_error, pytest.mark.slow]),
        looked_up_where_long,
    ],
)


def told(caplog):
    return [r.getMessage() for r in caplog.records if r.name == untraceable_guards.LOG.name]


def test_the_function_runs_eagerly_and_others_are_compiled(caplog):
    """The trace ended in an error, where plain aot_eager runs."""
    compiled = torch.compile(layer, backend="megamoe", options=FX)
    for parts in (4, 4, 3):
        (x, order), (y, _) = inputs(parts), inputs(parts)
        found, expected = compiled(x, order), layer(y, order)
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(found, expected)
        assert torch.equal(x.grad, y.grad)
    assert not torch._dynamo.config.suppress_errors
    if not ends_graphs_at_lists():
        (line,) = set(told(caplog))
        assert "test_untraceable_guards.py" in line
        assert "order.tolist()" in line


@cases
def test_so_does_one_that_was_compiled_before_where_there_are_no_ranks(caplog, where_long):
    compiled = torch.compile(where_long, backend="megamoe", options=FX)
    for parts in (2, 6):
        x, order = inputs(parts)
        assert torch.equal(compiled(x, order), where_long(x, order))
    assert len(set(told(caplog))) == 1


@cases
def test_where_there_are_ranks_it_does_not(fake_ranks, where_long):
    """Other ranks may still run what was compiled, rewritten."""
    compiled = torch.compile(where_long, backend="megamoe", options=FX)
    compiled(*inputs(2))
    for _ in range(2):
        with pytest.raises(ENDS_THE_TRACE):
            compiled(*inputs(6))
    assert torch.equal(compiled(*inputs(2)), inputs(2)[0] * 2)
    torch._dynamo.reset()  # torch counts no compilation that has not ended


def test_other_errors_are_raised():
    def failing(x):
        raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program"):
        torch.compile(failing, backend="megamoe", options=FX)(torch.ones(4))
    with pytest.raises(InvalidConfig, match="chunkz"):
        torch.compile(torch.sin, backend="megamoe", options={"megamoe.chunkz": 1})(torch.ones(4))
    assert not torch._dynamo.config.suppress_errors


def test_a_whole_graph_has_no_eager_function():
    compiled = torch.compile(layer, backend="megamoe", options=FX, fullgraph=True)
    with pytest.raises(ENDS_THE_TRACE):
        compiled(*inputs(4))
    torch.compile(torch.sin, backend="megamoe", options=FX)(torch.ones(2))
    assert not torch._dynamo.config.suppress_errors
