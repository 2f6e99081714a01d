"""What Inductor makes of the operators' references on a CPU: the same bytes, the same values."""

import pytest
import torch

from moe_compile.ops.quantized_rows import pack_rows, unpack_rows


def compare(function, width):
    compiled = torch.compile(function, fullgraph=True)
    own = torch.Generator().manual_seed(width)
    for num_rows in (64, 7):
        rows = (torch.randn(num_rows, width, generator=own) * 10).bfloat16()
        torch._dynamo.mark_dynamic(rows, 0)
        index = torch.randint(-num_rows, num_rows, (2 * num_rows,), generator=own)
        for mine, eager in zip(compiled(rows, index), function(rows, index), strict=True):
            assert torch.equal(mine, eager)


@pytest.mark.parametrize("width", [200, pytest.param(256, marks=pytest.mark.slow)])
def test_inductor_packs_the_same_bytes_and_unpacks_the_same_values(width):
    def there_and_back(rows, index):
        message = pack_rows(rows, index)
        return message, unpack_rows(message, width, rows.dtype)

    compare(there_and_back, width)


@pytest.mark.parametrize("width", [130, pytest.param(192, marks=pytest.mark.slow)])
def test_inductor_unpacks_a_last_block_that_is_not_full(width):
    """In one kernel with the packing it read past the scales of a row, or uninitialised memory."""

    def there_and_back(rows, index):
        return [unpack_rows(pack_rows(rows, None), width, rows.dtype)]

    compare(there_and_back, width)
