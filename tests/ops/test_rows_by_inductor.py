"""What Inductor makes of the operators' references on a CPU: the same bytes, the same values."""

import pytest
import torch

from moe_compile.ops.quantize import pack_rows, unpack_rows


@pytest.mark.parametrize("width", [200, pytest.param(256, marks=pytest.mark.slow)])
def test_inductor_packs_the_same_bytes_and_unpacks_the_same_values(width):
    def there_and_back(rows, index):
        message = pack_rows(rows, index)
        return message, unpack_rows(message, width, rows.dtype)

    compiled = torch.compile(there_and_back, dynamic=True, fullgraph=True)
    own = torch.Generator().manual_seed(width)
    for num_rows in (7, 64):
        rows = (torch.randn(num_rows, width, generator=own) * 10).bfloat16()
        index = torch.randint(-num_rows, num_rows, (2 * num_rows,), generator=own)
        for mine, eager in zip(compiled(rows, index), there_and_back(rows, index), strict=True):
            assert torch.equal(mine, eager)
