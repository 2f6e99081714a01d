"""`backend="megamoe"` needs no import of ours, and errors are clear where users meet them."""

import os
import subprocess
import sys

import pytest
import torch

from moe_compile.backend import megamoe
from moe_compile.errors import InvalidConfig
from moe_compile.graph.query import is_all_to_all
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts


def test_the_name_is_found_without_any_import_of_ours():
    code = (
        "import sys, torch\n"
        "assert not any(m.startswith(('moe_compile', 'passes')) for m in sys.modules)\n"
        "f = torch.compile(lambda x: x * 2 + 1, backend='megamoe',"
        " options={'megamoe.codegen': 'fx'})\n"
        "assert torch.equal(f(torch.ones(3)), torch.full((3,), 3.0))\n"
        "assert 'moe_compile.backend' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"megamoe.chunkz": 2}, "Did you mean 'chunks'"),
        ({"megamoe.chunks": "many"}, "whole number"),
        ({"megamoe.disable_passes": ["chunk_region"]}, "Did you mean 'chunk_regions'"),
        ({"megamoe.hardware": "h300"}, "no profile"),
    ],
)
def test_a_wrong_option_reaches_the_user_as_an_invalid_config(options, message):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend="megamoe", options=options)
    with pytest.raises(Exception, match=message) as caught:
        compiled(torch.ones(2))
    chain = [caught.value, caught.value.__cause__, getattr(caught.value, "inner_exception", None)]
    assert any(isinstance(error, InvalidConfig) for error in chain)


def test_options_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("MEGAMOE_CHUNKS", "none")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="chunks is 'none'"):
        torch.compile(lambda x: x + 1, backend="megamoe")(torch.ones(2))


def test_an_exchange_over_a_group_that_is_gone_is_said(fake_ranks):
    layer = GroupedExperts(16, 24, 8, 2, fake_ranks)
    (gm,) = dynamo_graphs(layer, torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True))
    for node in gm.graph.nodes:
        if is_all_to_all(node):
            node.args = (*node.args[:-1], "gone")
    gm.recompile()
    with pytest.raises(InvalidConfig, match="process group 'gone', which does not exist"):
        megamoe(gm, [])


def test_torch_logs_shows_one_line_per_compilation(tmp_path):
    code = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())\n"
        "from tests.layers import GroupedExperts\n"
        "layer = GroupedExperts(16, 24, 4, 2, dist.group.WORLD)\n"
        "f = torch.compile(layer, backend='megamoe', options={'megamoe.codegen': 'fx'})\n"
        "f(torch.randn(8, 16, dtype=torch.bfloat16)); dist.destroy_process_group()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True,
        env={**os.environ, "TORCH_LOGS": "+moe_compile"},
    )  # fmt: skip
    assert run.stderr.count("1 MoE regions in [2] chunks") == 1
