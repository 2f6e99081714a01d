"""What Inductor makes of the operators' references on a CPU: the same bytes, the same values."""

import pytest
import torch

from moe_compile.ops.quantize import pack_rows, unpack_rows
from tests.slow_parameters import slow_but


ALL = [(130, False), (192, False), (200, True), (256, True)]


@pytest.mark.parametrize(("width", "are_picked"), slow_but([(130, False)], ALL))
def test_inductor_packs_the_same_bytes_and_unpacks_the_same_values(width, are_picked):
    """Without an index it vectorises, and read past the scales of a row's last, partial block."""

    def there_and_back(rows, index):
        message = pack_rows(rows, index)
        return message, unpack_rows(message, width, rows.dtype)

    compiled = torch.compile(there_and_back, dynamic=True, fullgraph=True)
    own = torch.Generator().manual_seed(width)
    for num_rows in (7, 64):
        rows = (torch.randn(num_rows, width, generator=own) * 10).bfloat16()
        picked = torch.randint(-num_rows, num_rows, (2 * num_rows,), generator=own)
        index = picked if are_picked else None
        for mine, eager in zip(compiled(rows, index), there_and_back(rows, index), strict=True):
            assert torch.equal(mine, eager)
