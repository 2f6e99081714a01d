"""Losses of validation are those of one rank, however the model and its sequences are divided."""

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from tests.integration.titan_jobs import OURS, STOCK, VALIDATES, train
from tests.slow_parameters import exhaustive_but
from torchtitan_integration.layout import KEYS

STILL = {"optimizer.lr": 0.0, "training.steps": 2, "training.local_batch_size": 4}
VALIDATES_FOUR = {**VALIDATES, "validation.local_batch_size": 4}
ALONE = {KEYS["dp_shard"]: 1, KEYS["ep"]: 1}
PIPELINE = {"model.flavor": "tiny_pipeline"}
WAYS = {
    "pp": (PIPELINE, {**ALONE, KEYS["pp"]: 2, "megamoe.strict": False}),
    "cp": ({}, {KEYS["dp_shard"]: 1, KEYS["cp"]: 2}),
    "cp qwen3": ({KEYS["model"]: "qwen3"}, {KEYS["dp_shard"]: 1, KEYS["cp"]: 2}),
}


@pytest.mark.parametrize("way", exhaustive_but(["pp", "cp"], list(WAYS)))
def test_the_loss_of_validation_is_that_of_one_rank(two_ranks, tmp_path, way):
    """With CP torchtitan divides by the tokens of a part: the loss was as many times too large."""
    model, layout = WAYS[way]
    (alone,) = train(two_ranks, 1, tmp_path / "one", STILL, VALIDATES_FOUR, model, ALONE, STOCK)
    divided = train(two_ranks, 2, tmp_path / "two", STILL, VALIDATES_FOUR, model, OURS, layout)
    expected = [float(loss) for loss in alone.validated]
    assert len(expected) == 2
    assert [float(loss) for loss in divided[-1].validated] == pytest.approx(expected, abs=2e-4)
