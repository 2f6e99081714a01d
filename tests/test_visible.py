"""What docs/visible.md says of its layer, and of each change to it, is what `explain` says."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed._functional_collectives import all_to_all_single_autograd

import megamoe
import moe_compile
from moe_compile.errors import InvalidConfig

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "visible.md").read_text()
(LAYER,) = (b for b in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class MoE" in b)
CHANGES = re.findall(r"```diff\n- (.*?)\n\+ (.*?)\n```\n\n> (.*?)\n", PAGE)
RUN_THE_PAGE = """
import sys, torch, torch.distributed as dist
import moe_compile
sys.path.insert(0, sys.argv[1])
from visible import MoE
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layer = MoE(16, 32, 8, 2, dist.group.WORLD).bfloat16()
rows = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)

def with_a_break(rows):
    print("between")
    return layer(rows * 2)

explanation = moe_compile.explain(with_a_break, rows)
(found,) = [one for one in explanation.report["exchanges"]]
assert found["is_found"] and explanation.num_graphs == 1 and explanation.is_whole
(where,) = explanation.breaks
assert "in with_a_break" in where
"""


class ScaledExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, got, sent, group):
        ctx.sizes = got, sent, group
        received = rows.new_empty(sum(got), rows.shape[1])
        torch.distributed.all_to_all_single(received, rows, got, sent, group=group)
        return received * 0.5

    @staticmethod
    def backward(ctx, gradient):
        got, sent, group = ctx.sizes
        received = gradient.new_empty(sum(sent), gradient.shape[1])
        torch.distributed.all_to_all_single(received, gradient, sent, got, group=group)
        return received * 0.5, None, None, None


def sent_async(rows, got, sent, group):
    received = rows.new_empty(sum(got), rows.shape[1])
    torch.distributed.all_to_all_single(
        received, rows, got, sent, group=group, async_op=True
    ).wait()
    return received


left_out = torch.compiler.disable(all_to_all_single_autograd)
BROKEN = {"ScaledExchange": ScaledExchange, "sent_async": sent_async, "left_out": left_out}


def explained(text, group, folder, **options):
    path = folder / "visible.py"
    path.write_text(text)
    names = dict(BROKEN)
    exec(compile(text, str(path), "exec"), names)
    layer = names["MoE"](64, 128, 8, 2, group).bfloat16()
    rows = torch.randn(256, 64, dtype=torch.bfloat16, requires_grad=True)
    return moe_compile.explain(layer, rows, **options)


def flat(text):
    return " ".join(text.split())


def test_the_layer_of_the_page_is_found_and_chunked(fake_ranks, tmp_path, capsys):
    explanation = explained(LAYER, fake_ranks, tmp_path, chunks=2)
    printed = capsys.readouterr().out
    (block,) = re.findall(r"```\n(megamoe: .*?)```", PAGE, re.DOTALL)
    assert printed.startswith(block)
    assert "chunked" in printed[len(block) :]
    assert str(explanation).startswith(block)
    assert repr(explanation) == "<Explanation: 1 of 1 exchanges found>"
    (region,) = explanation.report["regions"]
    assert (region["verdict"], region["num_chunks"]) == ("chunked", 2)
    assert [graph["phase"] for graph in explanation.report["graphs"]] == ["forward", "backward"]


@pytest.mark.parametrize(("instead", "line", "said"), CHANGES, ids=[c[2][:30] for c in CHANGES])
def test_each_change_of_the_page_hides_the_layer_as_it_says(
    fake_ranks, tmp_path, capsys, instead, line, said
):
    assert LAYER.count(line) == 1
    explanation = explained(LAYER.replace(line, instead), fake_ranks, tmp_path)
    printed = flat(capsys.readouterr().out)
    assert said in printed and "change" in printed
    assert not any(region["verdict"] == "chunked" for region in explanation.report["regions"])


def test_there_are_changes_of_every_kind():
    assert len(CHANGES) >= 8 and LAYER.count("\n") <= 42


def test_a_model_without_exchanges_is_told_what_may_hide_them(capsys):
    moe_compile.explain(lambda x: x * 2, torch.ones(3))
    assert "no all-to-all is in any graph" in flat(capsys.readouterr().out)


def test_what_torch_compile_returned_is_explained_as_it_was(fake_ranks, tmp_path, caplog):
    def model(x):
        return x + 1

    with caplog.at_level(logging.WARNING):
        explanation = moe_compile.explain(torch.compile(model, backend="megamoe"), torch.ones(3))
    assert explanation.num_graphs == 1 and explanation.is_whole


def test_an_unknown_option_is_refused():
    with pytest.raises(InvalidConfig, match="Did you mean 'chunks'"):
        moe_compile.explain(lambda x: x, torch.ones(3), chunk=2)
    with pytest.raises(InvalidConfig, match=r"megamoe\.chunks is 0"):
        moe_compile.explain(lambda x: x, torch.ones(3), **{"megamoe.chunks": 0})


@pytest.mark.parametrize("name", ["moe_compile", "megamoe"])
def test_importing_the_package_imports_no_torch(name):
    code = f"import {name} as one, sys; one.explain; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=ROOT)


def test_the_name_of_the_distribution_has_the_same_public_names():
    assert sorted(megamoe.__all__) == sorted(moe_compile.__all__)
    assert all(getattr(megamoe, name) is getattr(moe_compile, name) for name in megamoe.__all__)


@pytest.mark.slow
def test_a_model_with_breaks_is_run_once_to_see_what_comes_after(tmp_path):
    (tmp_path / "visible.py").write_text(LAYER)
    script = tmp_path / "script.py"
    script.write_text(RUN_THE_PAGE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("1 exchange, 1 found") == 1  # rank 0 alone prints
