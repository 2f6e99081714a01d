"""Host reads in graphs make no program fail that runs without them there."""

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from moe_compile.torch_quirks.unbacked_shapes import eager_where_a_value_is_needed
from tests.slow_parameters import slow_but


def masks(positions, classes):
    """mixture-of-experts and st-moe-pytorch make theirs so: as many classes as a tensor says."""
    most = positions.max() + 1
    return F.one_hot(positions, max(most + 1, classes))[..., :classes] * 2


@pytest.mark.parametrize("codegen", slow_but(["fx"], ["fx", "inductor"]))
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
