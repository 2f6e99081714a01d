"""`backend="megamoe"` needs no import of ours, and errors are clear where users meet them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_compile.backend import megamoe
from moe_compile.errors import InvalidConfig
from moe_compile.graph.query import is_all_to_all
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts

PROGRAM = """
import os, sys, torch, torch.distributed as dist
assert not any(m.startswith(('moe_compile', 'passes')) for m in sys.modules)
f = torch.compile(lambda x: x * 2 + 1, backend='megamoe', options={'megamoe.codegen': 'fx'})
assert torch.equal(f(torch.ones(3)), torch.full((3,), 3.0))
assert 'moe_compile.backend' in sys.modules
os.environ['TORCH_LOGS'] = '+moe_compile'
torch._logging._internal._init_logs()  # as torch does when it is imported
dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())
from tests.layers import GroupedExperts
layer = GroupedExperts(16, 24, 4, 2, dist.group.WORLD)
f = torch.compile(layer, backend='megamoe', options={'megamoe.codegen': 'fx'})
f(torch.randn(8, 16, dtype=torch.bfloat16))
dist.destroy_process_group()
"""


def test_the_name_is_found_without_any_import_of_ours_and_torch_logs_shows_each_compilation():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=False, timeout=300, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("1 MoE regions in [2] chunks") == 1
    graphs = ("dynamo_before_normalize_exchanges", "dynamo_after_rewrite_regions", "forward_before")
    assert all(f"megamoe_{name}" in run.stderr for name in graphs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"megamoe.chunkz": 2}, "Did you mean 'chunks'"),
        ({"megamoe.chunks": "many"}, "whole number"),
        ({"megamoe.disable_passes": ["rewrite_region"]}, "Did you mean 'rewrite_regions'"),
        (
            {"megamoe.hardware": "h300"},
            r"no profile 'h300'; write .*, detect, or one of a100, .*h200",
        ),
        ({"megamoe.transport": "function"}, "Did you mean 'functional'"),
        ({"chunks": 4}, r"Inductor has no 'chunks'; write 'megamoe\.chunks'"),
        ({"chunkz": 4}, r"neither megamoe nor Inductor has 'chunkz'"),
        ({"max_autotun": True}, "Did you mean 'max_autotune'"),
    ],
)
def test_a_wrong_option_reaches_the_user_as_an_invalid_config(options, message):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend="megamoe", options=options)
    with pytest.raises(InvalidConfig, match=message) as caught:
        compiled(torch.ones(2))
    assert "/" not in str(caught.value)


def test_a_mode_is_said_to_be_unknown_and_settings_of_inductor_pass():
    torch._dynamo.reset()
    with pytest.raises(InvalidConfig, match="mode 'silly'"):
        torch.compile(lambda x: x + 1, backend="megamoe", mode="silly")(torch.ones(2))
    settings = {"triton.cudagraphs": False, "megamoe.codegen": "fx"}
    compiled = torch.compile(lambda x: x + 1, backend="megamoe", options=settings)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_torch_refuses_a_mode_beside_options_as_the_reference_says():
    page = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    assert "Either mode or options can be specified" in " ".join(page.split())
    with pytest.raises(RuntimeError, match="Either mode or options can be specified"):
        torch.compile(torch.sin, backend="megamoe", mode="default", options={"megamoe.chunks": 4})


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
