"""In generated code the exchanges of attention and of experts run under each other's compute."""

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import run_fw_bw_and_get_code

from tests.block_layers import ParallelBlock, SerialBlock, block_input
from tests.filler_kinds import expected, kinds_in_code

OPTIONS = {
    "megamoe.chunks": 2,
    "megamoe.attention_chunks": 2,
    "megamoe.equal_tokens": True,
    "megamoe.max_memory_increase": 3.0,
    "megamoe.hardware": "cpu",
}


def kinds_of_block(rank, style):
    """Return, forward and backward, kind of exchange -> kinds of compute under it."""
    torch._dynamo.reset()
    groups = {"attention": dist.new_group(), "experts": dist.group.WORLD}
    block = style(groups["attention"], groups["experts"])
    compiled = torch.compile(block, backend="megamoe", fullgraph=True, options=OPTIONS)
    x = block_input()
    with torch._inductor.config.patch(fx_graph_cache=False):
        _, codes = run_fw_bw_and_get_code(lambda: compiled(x))
    found = [kinds_in_code(code) for code in codes]
    return [{kind: f[groups[kind].group_name] for kind in groups} for f in found]


@pytest.mark.slow
@pytest.mark.parametrize("style", [SerialBlock, ParallelBlock])
def test_generated_code_runs_exchanges_under_compute_of_other_kinds(two_ranks, style):
    for forward, backward in two_ranks.run(kinds_of_block, style):
        for phase, found in (("forward", forward), ("backward", backward)):
            for kind, kinds in expected(style, phase).items():
                assert kinds <= found[kind], (phase, kind, found)
