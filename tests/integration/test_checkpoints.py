"""Checkpoints written with megamoe are torchtitan's, and the other way round."""

import functools
import shutil

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from tests.integration.titan_jobs import OURS, STOCK, train

SAVES = {"checkpoint.enable": True, "checkpoint.interval": 2, "activation_checkpoint.mode": "full"}
EP_4 = {"parallelism.expert_parallel_degree": 4}


@pytest.fixture(scope="module")
def written(four_ranks, tmp_path_factory):
    """Make an uninterrupted run of five steps, with or without megamoe; return folder and run."""

    @functools.cache
    def run(way):
        folder = tmp_path_factory.mktemp(way)
        changes = {"ours": OURS, "stock": STOCK}[way]
        return folder, train(four_ranks, 4, folder, SAVES, changes)[0]

    return run


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
    folder, run = written(writer)
    rest = resume(four_ranks, tmp_path, folder, reader)
    assert rest.steps == {step: run.steps[step] for step in (3, 4, 5)}


def test_another_ep_degree_loads_the_same_parameters_bit_for_bit(four_ranks, written, tmp_path):
    folder, run = written("ours")
    same = resume(four_ranks, tmp_path / "2", folder, STOCK)
    other = resume(four_ranks, tmp_path / "4", folder, OURS, EP_4)
    assert same.parameters and other.parameters == same.parameters
    assert other.parameters != run.parameters  # those of step 1
    assert other.placements != same.placements
    for step, (loss, _) in other.steps.items():
        assert abs(float(loss) - float(same.steps[step][0])) < 1e-3
