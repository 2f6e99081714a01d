"""Checkpoints written with megamoe are torchtitan's, and the other way round."""

import shutil

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from tests.integration.titan_jobs import OURS, STOCK, train

SAVES = {"checkpoint.enable": True, "checkpoint.interval": 2, "activation_checkpoint.mode": "full"}
EP_4 = {"parallelism.expert_parallel_degree": 4}


@pytest.fixture(scope="module")
def written(four_ranks, tmp_path_factory):
    """Uninterrupted runs of five steps, with and without megamoe, and their folders."""
    folders = {way: tmp_path_factory.mktemp(way) for way in ("ours", "stock")}
    changes = {"ours": OURS, "stock": STOCK}
    runs = {way: train(four_ranks, 4, folders[way], SAVES, changes[way])[0] for way in folders}
    return folders, runs


def resume(pool, folder, before, *changes):
    """Go on from step 2 of the run that wrote into `before`."""
    shutil.copytree(before / "checkpoint" / "step-2", folder / "checkpoint" / "step-2")
    return train(pool, 4, folder, SAVES, *changes)[0]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("ours", OURS),
        ("ours", STOCK),
        pytest.param("stock", OURS, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_prints_what_the_uninterrupted_one_did(
    four_ranks, written, tmp_path, writer, reader
):
    folders, runs = written
    rest = resume(four_ranks, tmp_path, folders[writer], reader)
    assert rest.steps == {step: runs[writer].steps[step] for step in (3, 4, 5)}


def test_another_ep_degree_loads_the_same_parameters_bit_for_bit(four_ranks, written, tmp_path):
    folders, runs = written
    same = resume(four_ranks, tmp_path / "2", folders["ours"], STOCK)
    other = resume(four_ranks, tmp_path / "4", folders["ours"], OURS, EP_4)
    assert same.parameters and other.parameters == same.parameters
    assert other.parameters != runs["ours"].parameters  # those of step 1
    assert other.placements != same.placements
    for step, (loss, _) in other.steps.items():
        assert abs(float(loss) - float(same.steps[step][0])) < 1e-3
