"""Programs at the edges of the row proof equal eager bit for bit on two ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_compile.testing.equivalence import differing_tensors
from tests.layers import LoopExperts
from tests.slow_parameters import slow_but


def run(rank, style, tokens, sizes, dtype, strict):
    """Return what differs from eager on one rank; `tokens` of each rank."""
    torch._dynamo.reset()
    width, hidden = sizes
    own = torch.Generator().manual_seed(rank)
    pair = [torch.randn(tokens[rank], width, generator=own).to(dtype) for _ in range(2)]
    options = {"megamoe.chunks": 2, "megamoe.strict": strict}

    def build():
        return style(width, hidden, 4, 2, dist.group.WORLD, dtype)

    return differing_tensors(build, [tuple(pair)], options)


def check(pool, style, tokens, sizes=(16, 24), dtype=torch.bfloat16, *, strict=True):
    for rank, differing in enumerate(pool.run(run, style, tokens, sizes, dtype, strict)):
        assert not differing, f"rank {rank}: {differing}"


class Gelu(LoopExperts):
    """Another activation, of several numbers at once or one by one."""

    def expert(self, x, e):
        return F.gelu(x @ self.w1[e], approximate="tanh") @ self.w2[e]


@pytest.mark.parametrize(
    ("style", "width"),
    slow_but([(LoopExperts, 17)], itertools.product([LoopExperts, Gelu], [17, 24])),
)
def test_rows_that_do_not_fill_vectors_are_not_rounded_anew(mirrored_ranks, style, width):
    """SiLU rounds the last elements of memory by other code: chunks ended elsewhere."""
    check(mirrored_ranks, style, (9, 7), (width, width), torch.float32, strict=False)
