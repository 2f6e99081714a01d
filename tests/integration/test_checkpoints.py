"""Checkpoints written with megamoe are torchtitan's, and the other way round."""

import functools
import importlib
import shutil

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.integration.titan_jobs import NOT_COMPILED, OURS, SAVES, STOCK, train
from tests.slow_parameters import exhaustive_but
from torchtitan_integration.layout import KEYS

RECOMPUTES = {**SAVES, "activation_checkpoint.mode": "full"}
EP_4 = {"parallelism.expert_parallel_degree": 4}
CHANGES = {
    "ours": OURS,
    "stock": STOCK,
    "ep 4": EP_4,
    "ep 1": {"parallelism.expert_parallel_degree": 1, "megamoe.strict": False},
    "several": {**OURS, "megamoe.blocks_per_graph": 2, "megamoe.batch_parts": 2},
    "async": {**OURS, "checkpoint.async_mode": "async"},
}
IN_HF = {
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
"""Hugging Face's names of an expert's weights, and torchtitan's."""


@pytest.fixture(scope="module")
def written(request, pool_for, tmp_path_factory):
    """Make an uninterrupted run of five steps, with or without megamoe; return folder and run."""

    @functools.cache
    def run(way, ranks):
        if way == "plain":
            plain = request.getfixturevalue("plain_job")
            return plain.folder, plain.ranks[0]
        folder = tmp_path_factory.mktemp(way)
        return folder, train(pool_for(ranks), ranks, folder, RECOMPUTES, CHANGES[way])[0]

    return run


@pytest.fixture(scope="module")
def resume(pool_for, written, tmp_path_factory):
    """Go on from step 2 of what as many ranks wrote as `writer`, each way once."""

    @functools.cache
    def run(writer, ranks, *ways):
        before, folder = written(writer, ranks)[0], tmp_path_factory.mktemp("resumed")
        shutil.copytree(before / "checkpoint" / "step-2", folder / "checkpoint" / "step-2")
        changes = [CHANGES[way] for way in ways]
        return train(pool_for(ranks), ranks, folder, RECOMPUTES, *changes)[0]

    return run


@pytest.mark.parametrize(
    ("writer", "reader"),
    exhaustive_but(
        [("ours", "stock"), ("stock", "ours")],
        [
            ("plain", "stock"),
            ("ours", "stock"),
            ("ours", "ours"),
            ("stock", "ours"),
            ("async", "ours"),
        ],
    ),
)
def test_a_resumed_run_prints_what_the_uninterrupted_one_did(written, resume, writer, reader):
    run = written(writer, 2)[1]
    assert resume(writer, 2, reader).steps == {step: run.steps[step] for step in (3, 4, 5)}


@pytest.mark.parametrize("reader", exhaustive_but(["ours"], ["stock", "ours"]))
def test_another_ep_degree_loads_the_same_parameters_bit_for_bit(written, resume, reader):
    run = written("ours", 4)[1]
    same, other = resume("ours", 4, "stock"), resume("ours", 4, reader, "ep 4")
    assert same.parameters and other.parameters == same.parameters
    assert other.parameters != run.parameters  # those of step 1
    assert other.placements != same.placements
    for step, (loss, _) in other.steps.items():
        assert abs(float(loss) - float(same.steps[step][0])) < 1e-3


def stored(step):
    """Return the hash of each tensor of a checkpoint, read by torch alone."""
    whole = step / "whole.pt"
    dcp_to_torch_save(step, whole)
    content = torch.load(whole, weights_only=True)
    model = {name: x for name, x in content.items() if isinstance(x, torch.Tensor)}
    moments = {f"optimizer.{name}": x for name, x in content["optimizer"].items()}
    return hashes_of({**model, **moments})


def hashes_of(tensors):
    worker = importlib.import_module("tests.integration.titan_worker")  # torchtitan, on the CPU
    return worker.hashes(tensors)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "reader"), [(2, "ep 1"), (4, "ep 4")])
def test_another_ep_degree_loads_model_and_moments_bit_for_bit(written, resume, ranks, reader):
    """Of parts of the batch and two blocks to a graph, on both sides."""
    folder = written("several", ranks)[0] / "checkpoint" / "step-2"
    loaded = resume("several", ranks, "several", reader).loaded
    assert loaded == stored(folder)
    assert {name.rpartition(".")[2] for name in loaded} >= {"exp_avg", "exp_avg_sq", "expert_bias"}


@pytest.mark.slow
@pytest.mark.parametrize("model", exhaustive_but(["deepseek_v3"], ["deepseek_v3", "qwen3"]))
def test_weights_of_hugging_face_are_written_and_read_bit_for_bit(pool_for, tmp_path, model):
    """Of our layout, not compiled: compiled code has no part in it."""
    safetensors = pytest.importorskip("safetensors.torch")
    stays = {KEYS["model"]: model, "optimizer.lr": 0.0, "training.steps": 1}
    writes = {**SAVES, "checkpoint.last_save_in_hf": True}
    written = train(pool_for(2), 2, tmp_path / "written", NOT_COMPILED, stays, writes)[0]
    folder = tmp_path / "written/checkpoint/step-1"
    files = [safetensors.load_file(file) for file in folder.glob("*.safetensors")]
    found = hashes_of({name: x for tensors in files for name, x in tensors.items()})
    for theirs, ours in IN_HF.items():
        experts = written.experts[f"layers.1.moe.experts.{ours}"]
        names = (f"model.layers.1.mlp.experts.{i}.{theirs}.weight" for i in range(len(experts)))
        assert [found[name] for name in names] == experts

    reads = {**SAVES, "checkpoint.initial_load_in_hf": True}
    reads["checkpoint.initial_load_path"] = str(folder)
    read = train(pool_for(4), 4, tmp_path / "read", NOT_COMPILED, stays, reads, EP_4)[0]
    assert read.loaded and read.parameters == written.parameters
    assert read.placements != written.placements
