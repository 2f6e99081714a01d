"""Host reads in graphs make no program fail that runs without them there."""

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from moe_compile.host_read_fallback import (
    eager_where_a_read_is_wrong,
    eager_where_a_value_is_needed,
)


def masks(positions, classes):
    """mixture-of-experts and st-moe-pytorch make theirs so: as many classes as a tensor says."""
    most = positions.max() + 1
    return F.one_hot(positions, max(most + 1, classes))[..., :classes] * 2


@pytest.mark.parametrize("codegen", ["fx", "inductor"])
def test_a_number_of_classes_that_a_tensor_says_is_no_error(codegen):
    """AOTAutograd ended the program: GuardOnDataDependentSymNode, which no graph break followed."""
    torch._dynamo.reset()
    compiled = torch.compile(masks, backend="megamoe", options={"megamoe.codegen": codegen})
    for most, size, classes in ((3, 8, 8), (5, 8, 4), (6, 12, 4)):
        positions = torch.randint(0, most, (size,), generator=torch.Generator().manual_seed(1))
        assert torch.equal(compiled(positions, classes), masks(positions, classes))


def test_code_that_was_rewritten_never_runs_eagerly():
    error = GuardOnDataDependentSymNode(sympy.Symbol("u0"), "a value is needed")
    rewritten = eager_where_a_value_is_needed(is_rewritten=True)
    with pytest.raises(GuardOnDataDependentSymNode), rewritten:
        raise error


class Capacity(torch.nn.Module):
    """A fixed number of slots for each expert, as DeepSpeed computes it: of tensors."""

    def forward(self, x):
        slots = torch.ceil((x.shape[0] / 4) * torch.tensor(2.0)).to(torch.int64)
        slots = int(torch.maximum(slots, torch.tensor(2)))
        return x.new_zeros(slots + 1) + x.sum()


class Scaled(torch.nn.Module):
    """A constant by the number of tokens, that nobody reads on the host."""

    def forward(self, x):
        return x * (torch.tensor(2.0) * (x.shape[0] / 4))


@pytest.mark.parametrize("codegen", ["fx", "inductor"])
def test_a_capacity_of_constants_and_symbols_is_what_it_is_in_eager(codegen):
    """Host reads in graphs had torch read what stands in for a symbol: two slots for any tokens."""
    torch._dynamo.reset()
    program = Capacity()
    compiled = torch.compile(program, backend="megamoe", options={"megamoe.codegen": codegen})
    for tokens in (16, 24, 32):
        x = torch.ones(tokens)
        assert torch.equal(compiled(x), program(x))


def test_a_constant_by_a_symbol_that_is_not_read_stays_in_its_graph():
    torch._dynamo.reset()
    graphs, program = [], Scaled()

    def count(gm, example_inputs):
        eager_where_a_read_is_wrong(gm.graph)
        graphs.append(gm)
        return gm

    compiled = torch.compile(program, backend=count, dynamic=True)
    assert torch.equal(compiled(torch.ones(16)), program(torch.ones(16)))
    assert len(graphs) == 1
