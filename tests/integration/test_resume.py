"""What a job cannot load or save is said before a process starts, with the key to change."""

import sys
import types

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.errors import InvalidConfig
from tests.integration.test_cli import RIGHT, write
from torchtitan_integration.job_checks import checked_ranks
from torchtitan_integration.job_file import read_job

SAVES = f"{RIGHT}[checkpoint]\nenable = true\n".replace("[training]", "[training]\nsteps = 4")


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """Return what is said of the job with flags; "" where it may start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", types.ModuleType("safetensors"))

    def ask(*flags):
        try:
            checked_ranks(read_job(write(tmp_path, SAVES), list(flags)), None, is_run=True)
        except InvalidConfig as error:
            return str(error)
        return ""

    return ask


def checkpoint(path, *, whole):
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"model train_state" if whole else b"model")


def test_a_finished_job_is_not_begun_again_and_the_key_to_change_is_named(answer, tmp_path):
    folder = tmp_path / "outputs/checkpoint"
    checkpoint(folder / "step-2", whole=True)
    checkpoint(folder / "step-4", whole=False)
    said = answer()
    assert "holds the model only" in said
    assert "write checkpoint.load_step = 2 and training.steps" in said
    assert 'write checkpoint.initial_load_path = "outputs/checkpoint/step-4" and ano' in said
    assert "checkpoint.load_step = 2;" in answer("--training.steps=6")
    assert answer("--training.steps=6", "--checkpoint.load_step=2") == ""
    excluded = "optimizer,lr_scheduler,dataloader,train_state"
    assert answer("--training.steps=6", f"--checkpoint.exclude_from_loading={excluded}") == ""
    assert answer("--checkpoint.no-enable") == ""
    checkpoint(folder / "step-6", whole=True)
    assert "step 6 of training.steps = 4" in answer()


def test_a_seed_is_begun_with_though_it_is_a_model_alone(answer, tmp_path):
    checkpoint(tmp_path / "outputs/checkpoint/step-0", whole=False)
    assert answer() == ""


def test_a_last_step_in_safetensors_is_no_step_to_go_on_from(answer, tmp_path):
    """torchtitan takes it for the newest step, and reads it as what it is not."""
    last = tmp_path / "outputs/checkpoint/step-2"
    last.mkdir(parents=True)
    (last / "model.safetensors.index.json").touch()
    said = answer()
    assert "holds the model only" in said and "checkpoint.initial_load_in_hf = true and" in said


@pytest.mark.parametrize("flag", ["initial_load_path=weights", "initial_load_in_hf"])
def test_an_empty_folder_of_checkpoints_does_not_hide_the_weights_named(answer, tmp_path, flag):
    """A job killed before its first checkpoint began anew with random weights."""
    (tmp_path / "outputs/checkpoint/step-2").mkdir(parents=True)
    assert answer() == ""
    assert "remove outputs/checkpoint" in answer(f"--checkpoint.{flag}")


def test_weights_to_begin_with_must_be_there_and_be_enough(answer, tmp_path):
    checkpoint(tmp_path / "model", whole=False)
    checkpoint(tmp_path / "whole", whole=True)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").touch()
    path, all_of_it = "--checkpoint.initial_load_path=", "--checkpoint.no-initial_load_model_only"
    in_hf = "--checkpoint.initial_load_in_hf"
    assert "holds no checkpoint; write the folder of a step" in answer(f"{path}nowhere")
    assert "write checkpoint.initial_load_in_hf = true" in answer(f"{path}hf")
    assert "write checkpoint.initial_load_model_only = true" in answer(f"{path}model", all_of_it)
    assert [answer(f"{path}model"), answer(f"{path}whole", all_of_it)] == ["", ""]
    assert "initial_load_path = 'model' holds no .safetensors" in answer(f"{path}model", in_hf)
    assert "model.hf_assets_path" in answer(in_hf)
    assert answer(f"{path}hf", in_hf) == ""


@pytest.mark.parametrize(
    ("asked", "needs"),
    [
        ("last_save_in_hf", "last_save_model_only"),
        ("initial_load_in_hf", "initial_load_model_only"),
    ],
)
def test_safetensors_hold_a_model_alone(answer, asked, needs):
    said = answer(f"--checkpoint.{asked}", f"--checkpoint.no-{needs}")
    assert f"write checkpoint.{needs} = true" in said


def test_a_package_that_safetensors_need_is_named(answer, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install safetensors" in answer("--checkpoint.last_save_in_hf")
