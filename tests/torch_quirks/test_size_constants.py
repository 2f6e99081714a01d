"""A capacity that is computed of tensors is what it is in eager, with any number of tokens."""

import pytest
import torch

from moe_compile.torch_quirks.size_constants import refuse_wrong_constants
from tests.slow_parameters import slow_but


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


@pytest.mark.parametrize("codegen", slow_but(["fx"], ["fx", "inductor"]))
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
        refuse_wrong_constants(gm.graph)
        graphs.append(gm)
        return gm

    compiled = torch.compile(program, backend=count, dynamic=True)
    assert torch.equal(compiled(torch.ones(16)), program(torch.ones(16)))
    assert len(graphs) == 1
