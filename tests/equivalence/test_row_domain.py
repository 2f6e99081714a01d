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


class PaddedLoop(LoopExperts):
    """Never runs an expert on no rows: a row of zeros stands behind those of each."""

    def expert(self, x, e):
        padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
        return super().expert(padded, e)[:-1]


class ConcatenatedInPairs(LoopExperts):
    """Joins the results of two experts, reads them twice, then joins the pairs."""

    def experts(self, rows, received):
        counts, self._counts = self._counts, None
        parts = torch.split(rows, counts)
        pairs = []
        for first in range(0, len(parts), 2):
            done = [self.expert(parts[i], i % self.local) for i in (first, first + 1)]
            pair = torch.cat(done)
            pairs.append(torch.concat([pair, pair.relu()], 1)[:, : rows.shape[1]])
        return torch.cat([torch.cat(pairs[:1], dim=-2), torch.cat(tensors=pairs[1:], dim=0)])


@pytest.mark.slow
@pytest.mark.parametrize("style", [PaddedLoop, ConcatenatedInPairs])
def test_what_joins_rows_of_several_experts_never_joins_nothing(mirrored_ranks, style):
    """A concatenation of experts that a chunk is without was left with no input."""
    check(mirrored_ranks, style, (3, 9))


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
