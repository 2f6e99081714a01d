"""Blocks that are compiled one by one, and are alike, share one compilation."""

import torch
import torch.distributed as dist

from moe_compile.report.process_report import REPORT
from tests.layers import GroupedExperts

WIDTH, NUM_BLOCKS = 16, 12
OPTIONS = {"megamoe.chunks": 2, "megamoe.codegen": "fx"}


def values_of_step(blocks, x):
    """Return output and all gradients of blocks one after another."""
    x = x.clone().requires_grad_()
    out = x
    for block in blocks:
        out = out + 0.1 * block(out)
    out.float().pow(2).sum().backward()
    return [out.detach(), x.grad, *(p.grad for block in blocks for p in block.parameters())]


def step_of_equal_blocks(rank):
    torch._dynamo.reset()
    steps, compilations = [], []
    for settings in ({"backend": "megamoe", "options": OPTIONS}, {"backend": "aot_eager"}):
        before = len(REPORT.compilations)
        made = [
            GroupedExperts(WIDTH, 24, 4, 2, dist.group.WORLD, seed=i) for i in range(NUM_BLOCKS)
        ]
        for block in made:
            block.compile(fullgraph=True, **settings)
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(rank)).bfloat16()
        steps.append(values_of_step(made, x))
        compilations.append(REPORT.compilations[before:])
    ours, theirs = steps
    verdicts = [(r.verdict, r.num_chunks) for c in compilations[0] for r in c.regions]
    return verdicts, all(map(torch.equal, ours, theirs))


def test_equal_blocks_are_compiled_once_and_each_computes_with_its_own_weights(mirrored_ranks):
    """What 61 blocks take to compile is what two take."""
    for verdicts, are_equal in mirrored_ranks.run(step_of_equal_blocks):
        assert are_equal and verdicts == [("chunked", 2)]
