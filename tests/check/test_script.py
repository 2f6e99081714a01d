"""A step that a function of the user's own script returns: what it must be, and its check."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from moe_compile.check.forms import AS_WRITTEN, PRECISE
from moe_compile.check.marks import first_difference
from moe_compile.check.script import ScriptSteps, given_by, load_function
from moe_compile.check.steps import trace
from moe_compile.cli import main
from moe_compile.commands.scripts import flags_of
from moe_compile.errors import InvalidConfig
from moe_compile.testing.rank_pool import forget_compiled

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/check.md").read_text()
(EXAMPLE,) = re.findall(r"^```python\n(# train\.py.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def check(folder, *words, name="check", launcher=("-m", "moe_compile.cli")):
    """Run a command on the page's example in `folder`; return its status and what it printed."""
    (folder / "train.py").write_text(EXAMPLE)
    command = [sys.executable, *launcher, name, "train.py:make_step", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_script_of_the_page_has_the_bits_of_the_program_as_written(tmp_path):
    status, said = check(tmp_path, "--nproc=2", "--steps=2", "--megamoe.codegen=fx")
    assert status == 0, said
    rows = json.loads((tmp_path / "outputs/train/check/same.json").read_text())["rows"]
    assert [row["found"] for row in rows] == ["the same bit for bit"] * 3
    assert rows[-1]["regions"] == ["4 regions chunked"]  # two of each rank


@pytest.mark.slow
def test_processes_of_torchrun_are_ranks_of_a_script_and_one_process_is_enough(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher = [*torchrun, "-m", "moe_compile.cli"]
    words = ["--steps=1", "--megamoe.codegen=fx"]
    status, said = check(tmp_path, *words, "--out=two", launcher=launcher)
    assert status == 0, said
    status, said = check(tmp_path, *words, "--out=one")
    assert status == 0, said
    for name, ranks in (("two", 2), ("one", 1)):
        assert json.loads((tmp_path / name / "summary.json").read_text())["ranks"] == ranks


@pytest.mark.slow
def test_generated_code_of_a_script_is_compared_and_timed_and_other_options_are_raced(tmp_path):
    status, said = check(
        tmp_path, "--nproc=2", "--steps=1", "--rounds=3", "--sections=same,faster,better"
    )
    assert status == 0, said
    assert "same: node by node: the same bit for bit; generated code: distance of gradients" in said
    assert "faster: a step by megamoe takes" in said and "better: " in said


@pytest.mark.slow
def test_a_script_that_is_right_has_no_culprit(tmp_path):
    words = ("--nproc=2", "--steps=1", "--megamoe.codegen=fx")
    status, said = check(tmp_path, *words, name="bisect")
    assert status == 1 and "no culprit is named: nothing differs" in said


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 0.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return torch.dropout(torch.sin(x @ self.weight), 0.5, train=True)


def returned(**others):
    """Return a correct result, its learning rate and random state changing with every step."""
    model = nn.Sequential(Layer(), Layer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(number):
        optimizer.zero_grad()
        loss = model(torch.rand(8, 4) + number).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    result = {"model": model, "blocks": list(model), "optimizer": optimizer, "state": [scheduler]}
    return {**result, "step": step, **others}


def test_every_form_starts_from_the_same_state():
    forget_compiled()
    torch.manual_seed(0)
    job = ScriptSteps(given_by(returned()), {})
    assert job.forms.num_switches == 2
    first, again = trace(job, AS_WRITTEN, 3), trace(job, AS_WRITTEN, 3)
    assert first_difference(first.marks, again.marks) is None
    losses = [first.marks[f"step {number}: loss"] for number in (1, 2, 3)]
    assert len({*map(repr, losses)}) == 3
    assert {"step 1: output of block 2", "step 3: gradient of 1.weight",
            "step 2: buffer 0.calls", "step 1: random state"} <= {*first.marks}  # fmt: skip


def test_a_checkpointed_block_runs_in_float64_from_its_input_to_its_gradients():
    forget_compiled()
    torch.manual_seed(0)
    job = ScriptSteps(given_by(returned(**of_checkpoints())), {})
    precise = trace(job, PRECISE, 1, keeps=True)
    assert "gradient of 0.weight" in precise.gradients  # as in the model, without its wrapper


def of_checkpoints():
    model = nn.Sequential(checkpoint_wrapper(Layer()), Layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number):
        loss = model(torch.ones(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return {
        "model": model,
        "blocks": list(model),
        "optimizer": optimizer,
        "step": step,
        "state": (),
    }


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"model": "x"}, "must be a torch.nn.Module; got a str"),
        ({"optimizer": [3]}, "must be a torch.optim.Optimizer, or a list of them; got a int"),
        ({"step": lambda: None}, "must be a function of the step's number; got a function"),
        (
            {"blocks": [nn.ReLU()]},
            "the key 'blocks' of the returned dictionary must be modules of the model",
        ),
        ({"blocks": []}, "must be modules of the model that are to be compiled"),
        (
            {"state": [3]},
            "the key 'state' of the returned dictionary must be objects with state_dict",
        ),
        ({"options": 3}, "must be the options= of torch.compile; got a int"),
        ({"optimiser": 3}, "with the unknown key 'optimiser'. Did you mean 'optimizer'"),
    ],
)
def test_a_wrong_part_is_named_with_what_to_write(change, wanted):
    with pytest.raises(InvalidConfig, match=re.escape(wanted)):
        given_by(returned(**change))


def test_what_is_missing_or_compiled_already_is_refused():
    with pytest.raises(
        InvalidConfig, match=r"must return a dictionary with the keys model, .*; got a list"
    ):
        given_by([])
    with pytest.raises(InvalidConfig, match="'step' is missing"):
        given_by({k: v for k, v in returned().items() if k != "step"})
    result = returned()
    result["model"][0].compile(backend="eager")
    with pytest.raises(InvalidConfig, match="a Layer is compiled already"):
        given_by(result)
    whole = torch.compile(nn.Sequential(Layer()), backend="eager")
    with pytest.raises(InvalidConfig, match="is compiled already"):
        given_by(returned(model=whole, blocks=whole))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (
            {"step": lambda number: None},
            "the step must return its loss, one number; got a NoneType",
        ),
        ({"step": lambda number: torch.zeros(())}, "the step must leave its gradients"),
        ({"options": {"megamoe.chunk": 2}}, "Did you mean 'chunk"),
        ({"options": {"megamoe.codegen": "fx"}}, "write --megamoe.codegen fx"),
    ],
)
def test_a_step_that_cannot_be_checked_is_refused(change, wanted):
    with pytest.raises(InvalidConfig, match=wanted):
        ScriptSteps(given_by(returned(**change)), {})


def test_flags_win_over_the_options_of_the_script(monkeypatch):
    monkeypatch.setenv("MEGAMOE_SCHEDULE", "0")
    flags = flags_of(["--megamoe.chunks", "4", "--megamoe.disable-passes=split_batch"])
    assert flags == {"chunks": 4, "disable_passes": ("split_batch",)}
    job = ScriptSteps(given_by(returned(options={"megamoe.chunks": 2})), flags)
    assert (job.config.chunks, job.config.schedule) == (4, False)


def test_a_script_imports_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_the_script.py").write_text("VALUE = 7\n")
    path = tmp_path / "json.py"  # a name that is taken
    path.write_text("from beside_the_script import VALUE\ndef f():\n    return VALUE\n")
    assert load_function(path, "f")() == 7 and json.loads("1") == 1


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["none.py:f"], "none.py: No such file"),
        (
            ["a.py"],
            "a.py names a script but no function: write a.py:FUNCTION, for example a.py:make_step",
        ),
        (["a.py:make_steps"], "a.py has no function 'make_steps'; its functions are make_step"),
        (["wrong.py:f"], "wrong.py is not Python"),
        (["a.py:make_step", "--layers", "2"], "--layers works for torchtitan jobs only"),
        (["a.py:make_step", "--training.steps", "2"], "a script takes only flags that begin with"),
        (["a.py:make_step", "--megamoe.chunk", "2"], "--megamoe.chunk: megamoe has no option"),
        (["a.py:make_step", "--megamoe.chunks"], "--megamoe.chunks: write a value after this flag"),
        (["a.py:make_step", "--megamoe.chunks", "0"], "megamoe.chunks is 0; write"),
        (["a.py:make_step", "--write", "--sections=better"], "write these options into the"),
    ],
)
def test_what_is_wrong_is_said_before_a_rank_starts(tmp_path, monkeypatch, capsys, words, wanted):
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("def make_step():\n    pass\n")
    Path("wrong.py").write_text("def f(:\n")
    assert main(["check", *words]) == 2
    assert wanted in capsys.readouterr().err
    assert not Path("outputs").exists()


@pytest.mark.slow
def test_a_script_that_returns_something_else_ends_the_check_with_what_to_write(tmp_path):
    (tmp_path / "bad.py").write_text("def make_step():\n    return 3\n")
    command = [sys.executable, "-m", "moe_compile.cli", "check", "bad.py:make_step"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "InvalidConfig: bad.py:make_step: the function must return a dictionary" in done.stdout
