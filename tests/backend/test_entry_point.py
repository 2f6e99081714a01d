"""`backend="megamoe"` needs no import of ours, and errors are clear where users meet them."""

import subprocess
import sys

import pytest
import torch

from moe_compile.errors import InvalidConfig


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
