"""Code that Dynamo would no longer compile, and so run eagerly on one rank alone, is an error."""

import pytest
import torch
import torch.distributed as dist

from moe_compile.testing.rank_pool import RankFailure
from tests.layers import GroupedExperts


def recompile_up_to(rank, steps):
    """Run steps of other numbers of tokens each, sizes not being symbols; return the switch.

    It is `fail_on_recompile_limit_hit`, before the first step and after each.
    """
    torch._dynamo.reset()
    layer = GroupedExperts(16, 24, 8, 2, dist.group.WORLD)
    options = {"megamoe.codegen": "fx", "megamoe.chunks": 2}
    compiled = torch.compile(layer, backend="megamoe", dynamic=False, options=options)
    limits = {"recompile_limit": 2, "fail_on_recompile_limit_hit": False}
    with torch._dynamo.config.patch(limits):
        seen = [torch._dynamo.config.fail_on_recompile_limit_hit]
        for number in range(steps):
            x = torch.rand(8 + number, 16, dtype=torch.bfloat16).requires_grad_()
            compiled(x).sum().backward()
            seen.append(torch._dynamo.config.fail_on_recompile_limit_hit)
        return seen


def test_a_rank_that_dynamo_would_run_eagerly_is_stopped(mirrored_ranks):
    """Its exchanges of whole rows met others' exchanges of chunks: a GPU would wait for ever."""
    for seen in mirrored_ranks.run(recompile_up_to, 2):
        assert seen == [False, False, True]
    with pytest.raises(RankFailure, match="fail_on_recompile_limit_hit"):
        mirrored_ranks.run(recompile_up_to, 3)
