"""Checkpoints written with megamoe are torchtitan's, and the other way round."""

import functools
import shutil

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from tests.integration.titan_jobs import OURS, SAVES, STOCK, train
from tests.slow_parameters import exhaustive_but

RECOMPUTES = {**SAVES, "activation_checkpoint.mode": "full"}
EP_4 = {"parallelism.expert_parallel_degree": 4}
CHANGES = {"ours": OURS, "stock": STOCK, "ep 4": EP_4}


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
        [("plain", "stock"), ("ours", "stock"), ("ours", "ours"), ("stock", "ours")],
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
