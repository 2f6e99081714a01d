"""On a CPU a job starts from one model, whatever its ranks and layout, and no expert is a copy."""

import functools
import importlib

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.testing.rank_pool import meeting_point
from tests.integration.titan_jobs import SMALL, STOCK, flags_of, small_job, train
from tests.slow_parameters import exhaustive_but
from torchtitan_integration.layout import KEYS, Layout

ONE_STEP = {**STOCK, "training.steps": 1}
LAYOUTS = {
    "two ranks": (2, Layout(dp_shard=2, ep=2)),
    "three ranks, which divide nothing": (3, Layout(dp_shard=3)),
    "four ranks, experts over all": (4, Layout(dp_shard=4, ep=4)),
    "tensor axes": (4, Layout(dp_shard=2, tp=2, ep=2, etp=2)),
    "experts over tensor axes": (4, Layout(dp_shard=2, tp=2, ep=4)),
    "replicas": (4, Layout(dp_replicate=2, dp_shard=2, ep=2)),
    "a pipeline": (4, Layout(dp_shard=2, pp=2, ep=2)),
}


@pytest.mark.slow
def test_no_two_experts_are_equal(plain_job):
    """Each rank drew the same numbers: experts 0 to 3, and their routers, were experts 4 to 7."""
    experts = plain_job.ranks[0].experts
    assert len(experts) == 4  # w1, w2, w3 and the router
    for name, hashes in experts.items():
        assert len(hashes) == len(set(hashes)) == 8, name


@pytest.mark.slow
def test_ranks_receive_different_numbers_of_rows(plain_job):
    """With equal routers for both ranks' experts every exchange was split in equal halves."""
    for of_step in zip(*(rank.rows for rank in plain_job.ranks), strict=True):
        received = [[0, 0] for _ in of_step[0]]  # by MoE layer
        for layer, of_ranks in enumerate(zip(*of_step, strict=True)):
            for counts in of_ranks:
                sent = [sum(counts[:4]), sum(counts[4:])]
                assert sum(sent) == 2 * 2 * 64  # top 2 of two sequences
                received[layer] = [sum(pair) for pair in zip(received[layer], sent, strict=True)]
        assert any(mine != other for mine, other in received)
    assert len(plain_job.ranks[0].rows) == 5


@pytest.fixture(scope="module")
def alone(four_ranks, tmp_path_factory):
    """The weights that one rank draws, by flavor; torchtitan's own trainer would draw them too."""

    @functools.cache
    def weights(flavor):
        folder, settings = tmp_path_factory.mktemp("alone"), {"model.flavor": flavor, **ONE_STEP}
        return train(four_ranks, 1, folder, {KEYS["ep"]: 1}, settings)[0].parameters

    return weights


@pytest.mark.slow
def test_two_ranks_that_train_with_megamoe_start_from_the_weights_of_one(plain_job, alone):
    assert {k: v for rank in plain_job.ranks for k, v in rank.parameters.items()} == alone("tiny")


@pytest.mark.parametrize(
    "name", exhaustive_but(["experts over tensor axes", "a pipeline"], LAYOUTS)
)
def test_a_seed_gives_the_same_weights_in_every_layout(four_ranks, tmp_path, alone, name):
    ranks, layout = LAYOUTS[name]
    settings = small_job(layout)
    found = train(four_ranks, ranks, tmp_path, settings, ONE_STEP)
    weights = {k: v for rank in found for k, v in rank.parameters.items()}
    assert weights == alone(settings.get("model.flavor", "tiny"))
    assert all(rank.parameters.items() <= weights.items() for rank in found)


def test_random_state_is_left_as_torchtitan_leaves_it(four_ranks, tmp_path):
    """Random operators of the training itself are none of the work-around's business."""
    settings = {**SMALL, **ONE_STEP, KEYS["ep"]: 1, "job.dump_folder": str(tmp_path)}
    store = meeting_point()
    states = four_ranks.run(_random_states, store.port, flags_of(settings))[0]
    assert len(states) == 2 and states[0] == states[1]


def _random_states(rank, port, flags):
    worker = importlib.import_module("tests.integration.titan_worker")
    return worker.random_states(rank, port, flags)
